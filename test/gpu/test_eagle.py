"""EAGLE and EAGLE-3 heads on the GPU: a budget of the context gives stock SGLang's tokens, a small one runs.

The models are random and tiny (test/unit/tiny_models.py): what they say is noise, but the same noise.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from test_exactness import EXACT, NEW_TOKENS, check
from tiny_models import TinyLlama, write_eagle, write_eagle3, write_llama

engines = pytest.importorskip("engines", reason="needs SGLang with CUDA", exc_type=ImportError)
pytestmark = pytest.mark.gpu

SHAPE = TinyLlama(hidden_size=256, num_layers=6, num_heads=8, num_kv_heads=2, head_dim=64, vocab_size=512)
HEADS = {"EAGLE": write_eagle, "EAGLE3": write_eagle3}
TREE = dict(speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=6)


def prompts() -> list[list[int]]:
    draw = random.Random(11)
    return [[draw.randrange(3, SHAPE.vocab_size) for _ in range(n)] for n in (20, 511, 900, 1700, 3000)]


@pytest.mark.parametrize("kind", HEADS)
def test_heads_agree_with_stock_and_run_sparse(kind: str, tmp_path: Path) -> None:
    model = write_llama(tmp_path / "target", SHAPE)
    head = HEADS[kind](tmp_path / "head", SHAPE)
    launch: dict[str, Any] = dict(model_path=str(model), speculative_draft_model_path=str(head))

    def run(algorithm: str, **options: Any) -> list[dict[str, Any]]:
        with engines.engine(algorithm, **(launch | options)) as running:
            return engines.greedy(running, prompts(), NEW_TOKENS)

    dense = run(kind)
    check(f"{kind} chain", run("dustin", env=EXACT), dense)
    check(f"{kind} tree", run("dustin", env=EXACT, **TREE), dense)
    sparse = run("dustin", env={"DUSTIN_BUDGET": "512"})
    check(f"{kind} within the budget", sparse[:1], dense[:1])
    assert all(len(result["ids"]) == NEW_TOKENS for result in sparse)
