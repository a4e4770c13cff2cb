"""Every batch size between the captured ones gives each request the tokens of a batch of one.

SGLang #6309, #9481 and PR #9687: a tree mask that was not padded to the captured batch, seen only hours later as an
illegal memory access. Graphs are captured for 1, 4, 8 and 12 requests.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from test_eagle import SHAPE, TREE
from test_exactness import check
from tiny_models import write_eagle, write_llama

engines = pytest.importorskip("engines", reason="needs SGLang with CUDA", exc_type=ImportError)
pytestmark = pytest.mark.gpu
NEW_TOKENS, LARGEST = 24, 13


def prompts() -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(3, SHAPE.vocab_size) for _ in range(60 + 70 * i)] for i in range(LARGEST)]


@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("budget", ["8192", "256"], ids=["dense", "sparse"])
def test_every_batch_size_between_the_captured_ones(shape: dict[str, int], budget: str, tmp_path: Path) -> None:
    model, head = write_llama(tmp_path / "target", SHAPE), write_eagle(tmp_path / "head", SHAPE)
    launch: dict[str, Any] = dict(model_path=str(model), speculative_draft_model_path=str(head), **shape)
    launch |= dict(cuda_graph_bs_decode=[1, 4, 8, 12], disable_radix_cache=True)
    with engines.engine("dustin", env={"DUSTIN_BUDGET": budget}, **launch) as running:
        alone = [engines.greedy(running, [prompt], NEW_TOKENS)[0] for prompt in prompts()]
        for size in range(1, LARGEST + 1):
            together = engines.greedy(running, prompts()[:size], NEW_TOKENS)
            assert all(len(result["ids"]) == NEW_TOKENS for result in together)
            if budget == "8192":  # a sparse list may turn on rounding, and another list is another answer
                check(f"batch of {size}", together, alone[:size])
