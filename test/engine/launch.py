"""Server arguments of the launches that the tests compare."""

from __future__ import annotations

import random
from typing import Any

from tiny_models import TinyLlama

# The shared bigram makes drafts of other shapes agree with the target often enough for runs of every length.
TARGET = TinyLlama(num_layers=8, bigram=1.0)
DRAFT = TinyLlama(hidden_size=48, num_layers=3, num_heads=6, num_kv_heads=3, head_dim=8, seed=4, bigram=1.0)
CHAIN = dict(speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4)
TREE = dict(speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=6)


def plain(models: dict[str, str], **changes: Any) -> dict[str, Any]:
    """No speculation."""
    return dict(model_path=models["target"]) | changes


def stock(models: dict[str, str], kind: str, **changes: Any) -> dict[str, Any]:
    """SGLang's own dense speculation with a draft of `kind`."""
    return (
        plain(models) | dict(speculative_algorithm=kind, speculative_draft_model_path=models[kind], **CHAIN) | changes
    )


def dustin(models: dict[str, str], kind: str = "standalone", **changes: Any) -> dict[str, Any]:
    """Dustin with a draft of `kind`."""
    return stock(models, kind) | dict(speculative_algorithm="dustin") | changes


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids of the tiny vocabulary."""
    draw = random.Random(seed)
    return [draw.randrange(3, TARGET.vocab_size) for _ in range(count)]
