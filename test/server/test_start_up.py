"""Every door reaches the algorithm, and what cannot start says so and exits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from serving import Server, command, free_port
from words import words


def test_the_start_up_line_says_what_runs(server: Server) -> None:
    line = next(line for line in server.log.read_text().splitlines() if "dustin: policy" in line)
    assert "policy hybrid, verification reads 64 positions (20 protected, 22 lookahead, 22 history)" in line
    assert "profile auto (draft layers 1,2: 12 heads, target layer 5: 4 heads)" in line
    assert "draft standalone; drafting reads every position" in line and "radix exact" in line


def test_sglang_serve_reaches_it_with_an_eagle_head(head_server: Server) -> None:
    assert len(head_server.generate(words(150), 10)["text"].split()) == 10
    assert "draft eagle;" in head_server.log.read_text()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--dustin-policy", "best"], "--dustin-policy (or DUSTIN_POLICY) is 'best'; it must be one of dense, history"),
        (["--dustin-budget", "lots"], "--dustin-budget (or DUSTIN_BUDGET) is 'lots'; it must be an integer"),
        (["--dustin-unknown", "1"], "unrecognized arguments: --dustin-unknown"),
        (["--attention-backend", "triton"], "remove --attention-backend triton"),
    ],
)
def test_a_bad_flag_is_a_clear_exit(tiny: dict[str, str], arguments: list[str], message: str) -> None:
    models = ["--model-path", tiny["target"], "--speculative-draft-model-path", tiny["draft"]]
    run = subprocess.run(
        command(*models, "--speculative-algorithm", "dustin", *arguments, port=free_port()),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode != 0 and message in run.stderr + run.stdout


def test_two_engines_of_different_kinds_in_one_process(tiny: dict[str, str], tmp_path: Path) -> None:
    """A whole-model draft after an EAGLE head: nothing of the first launch may decide the second."""
    script = tmp_path / "engines.py"
    script.write_text(
        "import sys\n"
        "import dustin_sglang.cpu\n"
        "dustin_sglang.cpu.enable()\n"
        "import sglang as sgl\n"
        "if __name__ == '__main__':\n"
        "    target, *drafts = sys.argv[1:]\n"
        "    for draft in drafts:\n"
        "        engine = sgl.Engine(model_path=target, speculative_algorithm='dustin',\n"
        "            speculative_draft_model_path=draft, device='cpu', dtype='float32', skip_tokenizer_init=True,\n"
        "            mem_fraction_static=0.3, max_total_tokens=2048, log_level='info')\n"
        "        ids = [3 + i * 7 % 250 for i in range(150)]\n"
        "        out = engine.generate(input_ids=ids, sampling_params=dict(temperature=0, max_new_tokens=8))\n"
        "        print('TOKENS', out['output_ids'])\n"
        "        engine.shutdown()\n"
    )
    run = subprocess.run(
        [sys.executable, str(script), tiny["target"], tiny["eagle"], tiny["draft"]],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"DUSTIN_BUDGET": "4096", "OMP_NUM_THREADS": "1"},
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("TOKENS")]
    assert len(lines) == 2 and lines[0] == lines[1], run.stderr[-3000:]
    assert "draft eagle;" in run.stderr and "draft standalone;" in run.stderr
