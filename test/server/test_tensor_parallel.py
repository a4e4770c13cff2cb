"""Two tensor-parallel ranks choose the lists, and give the tokens, of one rank.

SGLang #30296: sparse attention and EAGLE disagree about queries and KV when attention is split over ranks.
SGLang #6949, speculation that gains less at four ranks than at one, is a matter of speed on several GPUs: nothing that
a test on a CPU can show, and not measured yet (README.md, "Refused at start-up").
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from scheduler_harness import Engine, in_child
from serving import few_models

SCRIPT = """
import json, sys
import dustin_sglang.cpu
dustin_sglang.cpu.enable()
import sglang as sgl
if __name__ == '__main__':
    model, prompts = sys.argv[1], json.loads(sys.argv[2])
    engine = sgl.Engine(model_path=model, speculative_algorithm='dustin', speculative_draft_model_path=model,
        device='cpu', dtype='float32', skip_tokenizer_init=True, mem_fraction_static=0.2, max_total_tokens=2048,
        tp_size=2)
    for out in engine.generate(input_ids=prompts, sampling_params=dict(temperature=0, max_new_tokens=24)):
        print('TOKENS', out['output_ids'])
    engine.shutdown()
"""
# A whole-model draft with the target's head counts, which two ranks divide.
PROMPTS = [[3 + (i * step) % 250 for i in range(200)] for step in (7, 11)]
OPTIONS = {"DUSTIN_BUDGET": "60", "DUSTIN_WINDOW": "16", "OMP_NUM_THREADS": "1"}


# A plugin of SGLang, found by its metadata, that writes each rank's lists to a file of its own.
SPY = """
import json, os
from dustin_sglang.selection.selector import Selector

def register():
    select = Selector.select

    def recorded(self, context, seq_lens, **options):
        selection = select(self, context, seq_lens, **options)
        with open(os.path.join(os.environ["LISTS"], str(os.getpid())), "a") as file:
            for seq_len, listed in zip(seq_lens, selection.positions[0].tolist(), strict=True):
                file.write(json.dumps([seq_len, listed]) + "\\n")
        return selection

    Selector.select = recorded
"""


def write_spy(folder: Path) -> None:
    info = folder / "spy-0.dist-info"
    info.mkdir()
    (folder / "spy.py").write_text(SPY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spy\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nspy = spy:register\n")


def two_ranks(folder: Path, model: str, lists: Path) -> list[list[int]]:
    """Tokens of the requests; each rank writes its lists."""
    (folder / "engine.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(folder / "engine.py"), model, json.dumps(PROMPTS)],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ
        | OPTIONS
        | few_models()
        | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "LISTS": str(lists)}
        | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )
    lines = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("TOKENS")]
    assert len(lines) == len(PROMPTS), done.stderr[-3000:]
    return lines


def one_rank(folder: str, model: str) -> list[list[int]]:
    """The same on one rank, in this process, where SGLang has loaded its plugins before."""
    sys.path.insert(0, folder)
    importlib.import_module("spy").register()
    engine = Engine(
        model_path=model,
        speculative_algorithm="dustin",
        speculative_draft_model_path=model,
        max_total_tokens=2048,
    )
    return list(engine.generate({str(i): ids for i, ids in enumerate(PROMPTS)}, 24).values())


def written(lists: Path) -> list[list[Any]]:
    """Length and list of every selection, for each process that selected."""
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in lists.iterdir()]


def test_two_ranks_choose_the_lists_and_give_the_tokens_of_one(tiny: dict[str, str], tmp_path: Path) -> None:
    write_spy(tmp_path)
    alone, split = tmp_path / "one", tmp_path / "two"
    alone.mkdir()
    split.mkdir()
    tokens = two_ranks(tmp_path, tiny["target"], split)
    expected_tokens = in_child(one_rank, str(tmp_path), tiny["target"], env=OPTIONS | {"LISTS": str(alone)})
    first, second = written(split)
    (expected,) = written(alone)
    assert first == second and len(first) > 20
    assert sorted(first) == sorted(expected), "in whatever batches they were chosen"
    assert tokens == expected_tokens
