"""A batch whose committed lengths are on the device alone, as overlap scheduling leaves it, gets them before selection.

The CPU engine schedules without overlap, so the test takes the lengths away as SGLang's `FutureMap` does.
"""

from __future__ import annotations

from typing import Any

import pytest
from launch import TREE, dustin, tokens
from scheduler_harness import Engine, in_child

ENV = {"DUSTIN_BUDGET": "40", "DUSTIN_WINDOW": "8", "DUSTIN_SPARSE_DRAFT": "all"}
PROMPTS = {"a": tokens(90, 1), "b": tokens(60, 2)}


def answers(arguments: dict[str, Any], taken_away: bool) -> dict[str, list[int]]:
    engine = Engine(**arguments)
    worker, drafter = engine.worker, engine.worker._draft_worker
    forward, draft, select = worker.forward_batch_generation, drafter.draft, worker._select

    def forwarded(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if taken_away and not batch.forward_mode.is_extend():
            batch.seq_lens_cpu = batch.seq_lens_sum = None
        return forward(batch, *args, **kwargs)

    def drafted(batch: Any) -> Any:
        assert (batch.seq_lens_cpu is None) == taken_away
        return draft(batch)

    def selected(batch: Any, **kwargs: Any) -> Any:
        assert batch.seq_lens_cpu.tolist() == batch.seq_lens.tolist()
        return select(batch, **kwargs)

    worker.forward_batch_generation, drafter.draft, worker._select = forwarded, drafted, selected
    return engine.generate(PROMPTS, 24)


@pytest.mark.parametrize(
    "shape, interval", [({}, "0"), (TREE, "0"), ({}, "8")], ids=["chain", "tree", "chain with rectification"]
)
def test_lengths_are_awaited_after_the_draft(models: dict[str, str], shape: dict[str, int], interval: str) -> None:
    arguments, env = dustin(models, **shape), ENV | {"DUSTIN_RECTIFY_INTERVAL": interval}
    given = in_child(answers, arguments, False, env=env)
    assert in_child(answers, arguments, True, env=env) == given and len(given["a"]) == 24
