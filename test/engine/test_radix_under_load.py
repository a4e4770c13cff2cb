"""Whatever the scheduler does, the radix tree holds what a fresh prefill would write, of target and draft.

Each workload makes SGLang do something else to requests that are verified sparsely, and looks into the tree after every
batch: what it held at any time is compared with a prefill of the same tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from launch import TREE, dustin, tokens
from scheduler_harness import Engine, in_child
from tree_kv import Paths, drive, worst_difference

ENV = {"DUSTIN_BUDGET": "40", "DUSTIN_WINDOW": "16"}
RECTIFIED, DRAFTED = {"DUSTIN_RECTIFY_INTERVAL": "8"}, {"DUSTIN_SPARSE_DRAFT": "all"}
PREFIX = tokens(70, seed=1)

Workload = Callable[[Engine, Paths], None]


def abort(engine: Engine, rid: str) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    engine.scheduler.abort_request(AbortReq(rid=rid))


def lengths(engine: Engine, rids: list[str]) -> list[int]:
    return [len(engine.output(rid)) for rid in rids]


def chunked_prefill(engine: Engine, seen: Paths) -> None:
    """Prompts in chunks beside a sparse request with the same prefix; one of them is given up half-way."""
    engine.add("decodes", PREFIX + tokens(100, seed=2), 40)
    drive(engine, seen, 8)
    engine.add("enters", PREFIX + tokens(175, seed=3), 20)
    engine.add("leaves", PREFIX + tokens(200, seed=4), 20)
    chunks: Counter[str] = Counter()
    while engine.busy:
        drive(engine, seen, 1)
        if (part := engine.scheduler.chunked_req) is not None:
            chunks[part.rid] += 1
        if chunks["leaves"] == 2:
            abort(engine, "leaves")
    assert chunks["enters"] >= 2
    assert lengths(engine, ["decodes", "enters", "leaves"]) == [40, 20, 0]


def retraction(engine: Engine, seen: Paths) -> None:
    """More than the pool holds: requests are retracted and prefilled again, with what they have generated."""
    rids = [str(i) for i in range(4)]
    for i, rid in enumerate(rids):
        engine.add(rid, PREFIX + tokens(80, seed=10 + i), 80)
    drive(engine, seen)
    assert sum(engine.request(rid).retraction_count for rid in rids) > 0
    assert lengths(engine, rids) == [80] * 4


def eviction(engine: Engine, seen: Paths) -> None:
    """The same prompts twice; before they come again, others need their room."""
    evicted = []
    evict = engine.tree.evict

    def recorded(params: Any) -> Any:
        result = evict(params)
        evicted.append(result.num_tokens_evicted)
        return result

    engine.tree.evict = recorded
    for turn in range(2):
        for i in range(6):
            engine.add(f"{i} {turn}", tokens(182, seed=20 + i), 16)
            if i % 2:  # two at a time
                drive(engine, seen)
    assert sum(evicted) > 6 * 100
    assert [engine.output(f"{i} 1") for i in range(6)] == [engine.output(f"{i} 0") for i in range(6)]


def priorities(engine: Engine, seen: Paths) -> None:
    """Urgent requests take the place of sparse ones, which come back later."""
    low, high = ["low 0", "low 1"], ["high 0", "high 1"]
    for i, rid in enumerate(low):
        engine.add(rid, PREFIX + tokens(60, seed=30 + i), 40, priority=0)
    drive(engine, seen, 8)
    for i, rid in enumerate(high):
        engine.add(rid, PREFIX + tokens(90, seed=32 + i), 20, priority=100)
    drive(engine, seen)
    assert [engine.request(rid).retraction_count for rid in low + high] == [1, 1, 0, 0]
    assert lengths(engine, low + high) == [40, 40, 20, 20]


def aborts(engine: Engine, seen: Paths) -> None:
    """One request is aborted while it waits, one in sparse decoding; the third goes on."""
    for i in range(3):
        engine.add(str(i), PREFIX + tokens(110, seed=40 + i), 30)
    abort(engine, "0")
    drive(engine, seen, 10)
    abort(engine, "1")
    drive(engine, seen)
    waited, cut, whole = lengths(engine, ["0", "1", "2"])
    assert waited == 0 and 8 < cut < 30 and whole == 30


def audited(workload: Workload, arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a workload; lost slots, paths that the tree held, and how far they were from a prefill."""
    engine, seen = Engine(**arguments), Paths()
    workload(engine, seen)
    engine.scheduler.on_idle()
    leaked = engine.leaked()
    return dict(leaked=leaked, paths=len(seen), worst=worst_difference(engine, seen))


CHUNKS = dict(chunked_prefill_size=64)
SMALL_POOL = dict(max_total_tokens=640, schedule_conservativeness=0.1)
PRIORITY = dict(enable_priority_scheduling=True, max_running_requests=2)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "workload, kind, page_size, options, settings",
    [
        (chunked_prefill, "standalone", 1, CHUNKS, RECTIFIED),
        slow(chunked_prefill, "eagle", 64, CHUNKS, DRAFTED),
        (retraction, "standalone", 1, SMALL_POOL, DRAFTED),
        slow(retraction, "eagle", 16, SMALL_POOL | TREE, RECTIFIED),
        (eviction, "standalone", 1, SMALL_POOL, {}),
        slow(eviction, "eagle3", 64, SMALL_POOL, RECTIFIED),
        (priorities, "standalone", 1, PRIORITY, RECTIFIED),
        slow(priorities, "eagle", 16, PRIORITY | TREE, DRAFTED),
        (aborts, "standalone", 64, {}, {}),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_the_tree_holds_what_a_prefill_writes(
    models: dict[str, str],
    workload: Workload,
    kind: str,
    page_size: int,
    options: dict[str, Any],
    settings: dict[str, str],
) -> None:
    arguments = dustin(models, kind, page_size=page_size, **options)
    result = in_child(audited, workload, arguments, env=ENV | settings)
    assert result["paths"] and result["leaked"] == 0
    assert max(result["worst"].values()) < 2e-5, result["worst"]
