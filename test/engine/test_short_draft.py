"""A draft whose own context is shorter than a request, where the user allows it.

SGLang #3574, vLLM #21986, #57941, PR #24662 and PR #22935: a request beyond the draft's positions crashes, or reads out
of bounds. Such a pair is refused at start-up (test/unit/test_refusals.py) unless the user says that it extrapolates.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from launch import dustin, plain, tokens
from scheduler_harness import Engine, in_child

DRAFT_CONTEXT, NEW_TOKENS = 64, 24
PROMPTS = {"crosses": tokens(DRAFT_CONTEXT - 8, seed=1), "beyond": tokens(900, seed=2)}


def generate(arguments: dict[str, Any]) -> dict[str, list[int]]:
    return Engine(**arguments).generate(PROMPTS, NEW_TOKENS)


@pytest.mark.parametrize("kind", ["standalone", "eagle3"])
def test_a_request_beyond_the_drafts_context_gets_the_dense_tokens(
    models: dict[str, str], tmp_path: Path, kind: str
) -> None:
    short = Path(shutil.copytree(models[kind], tmp_path / kind))
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": DRAFT_CONTEXT}))
    env = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1", "DUSTIN_BUDGET": "4096"}
    arguments = dustin(models | {kind: str(short)}, kind)
    assert in_child(generate, arguments, env=env) == in_child(generate, plain(models))
