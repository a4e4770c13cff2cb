"""Every door reaches the algorithm, and what cannot start says so and exits."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scheduler_harness import in_child
from serving import Server, command, few_models, free_port
from words import words


def test_the_start_up_line_says_what_runs(server: Server) -> None:
    line = next(line for line in server.log.read_text().splitlines() if "dustin: policy" in line)
    assert "policy hybrid-sum, verification reads 64 positions (20 protected, 44 by the sum of lookahead" in line
    assert "profile auto (draft layers 1,2: 12 heads, target layer 5: 4 heads)" in line
    assert "draft standalone; drafting reads every position" in line and "radix exact" in line


def test_sglang_serve_reaches_it_with_an_eagle_head(head_server: Server) -> None:
    assert len(head_server.generate(words(150), 10)["text"].split()) == 10
    assert "draft eagle;" in head_server.log.read_text()


def launch(arguments: list[str]) -> str:
    """What ``python -m sglang.launch_server`` says when it does not start."""
    import runpy
    from contextlib import redirect_stderr

    stderr, sys.argv = io.StringIO(), ["launch_server", *arguments]
    try:
        with redirect_stderr(stderr):
            runpy.run_module("sglang.launch_server", run_name="__main__")
    except (SystemExit, Exception) as error:
        assert not isinstance(error, SystemExit) or error.code not in (None, 0), "it exited without an error"
        return f"{stderr.getvalue()}{error}"
    raise AssertionError("the server ran and ended")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--dustin-policy", "best"], "--dustin-policy (or DUSTIN_POLICY) is 'best'; it must be one of dense, history"),
        (["--dustin-unknown", "1"], "unrecognized arguments: --dustin-unknown"),
        (["--attention-backend", "triton"], "remove --attention-backend triton"),
    ],
)
def test_a_bad_flag_says_so(tiny: dict[str, str], arguments: list[str], message: str) -> None:
    # From the fork server, which has SGLang imported: a process of its own would take most of its time for that.
    assert message in in_child(launch, launch_arguments(tiny, *arguments))


def test_a_bad_flag_is_a_clear_exit(tiny: dict[str, str]) -> None:
    run = subprocess.run(
        command(*launch_arguments(tiny, "--dustin-budget", "lots"), port=free_port()),
        capture_output=True,
        text=True,
        timeout=120,
    )
    message = "--dustin-budget (or DUSTIN_BUDGET) is 'lots'; it must be an integer"
    assert run.returncode != 0 and message in run.stderr + run.stdout


def launch_arguments(tiny: dict[str, str], *arguments: str) -> list[str]:
    models = ["--model-path", tiny["target"], "--speculative-draft-model-path", tiny["draft"], "--device", "cpu"]
    return [*models, "--speculative-algorithm", "dustin", *arguments]


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
        env=os.environ | {"DUSTIN_BUDGET": "4096", "OMP_NUM_THREADS": "1"} | few_models(),
    )
    lines = [line for line in run.stdout.splitlines() if line.startswith("TOKENS")]
    assert len(lines) == 2 and lines[0] == lines[1], run.stderr[-3000:]
    assert "draft eagle;" in run.stderr and "draft standalone;" in run.stderr
