"""Fifty requests at a time, entering and leaving in every round, get what they get alone.

The comment on SGLang PR #10090: whole-model speculation that dies after a thousand requests at fifty in parallel, where
batches of different sizes are merged. The soak in test/server runs for minutes; this asks for the sizes.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from launch import dustin, tokens
from scheduler_harness import Engine, in_child

PARALLEL, REQUESTS = 50, 90
ENV = {"DUSTIN_BUDGET": "30", "DUSTIN_WINDOW": "8"}
PROMPTS = [tokens(n, seed=n) for n in (4, 13, 22, 28, 35, 44, 52, 60)]  # within the budget, across it, beyond it
LONGEST = 12


def crowd(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run each prompt alone, then many at once, a few more in every round and each for a while of its own."""
    engine, draw = Engine(**arguments), random.Random(1)
    alone = [engine.generate({f"alone {i}": ids}, LONGEST)[f"alone {i}"] for i, ids in enumerate(PROMPTS)]
    asked: dict[str, tuple[int, int]] = {}
    most = 0
    while engine.busy or len(asked) < REQUESTS:
        for _ in range(draw.randrange(0, 24)):
            if len(asked) < REQUESTS:
                rid, which, new_tokens = str(len(asked)), draw.randrange(len(PROMPTS)), draw.randrange(1, LONGEST + 1)
                asked[rid] = (which, new_tokens)
                engine.add(rid, PROMPTS[which], new_tokens)
        engine.step()
        most = max(most, len(engine.scheduler.running_batch.reqs))
    engine.scheduler.on_idle()
    wrong = [rid for rid, (which, n) in asked.items() if engine.output(rid) != alone[which][:n]]
    return dict(wrong=wrong, most=most, leaked=engine.leaked())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["standalone", "eagle"])
def test_fifty_at_a_time(models: dict[str, str], kind: str) -> None:
    arguments = dustin(models, kind, max_running_requests=PARALLEL, max_total_tokens=8192)
    result = in_child(crowd, arguments, env=ENV)
    assert result["most"] > PARALLEL * 0.7, "not a crowd"
    assert result["wrong"] == [] and result["leaked"] == 0
