"""Rectified KV is a fresh prefill's: target and draft, all layers, whatever else runs; and it is shared afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from launch import TREE, dustin, tokens
from scheduler_harness import Engine, in_child

from dustin_sglang.radix import exact_len

ENV = {"DUSTIN_BUDGET": "40", "DUSTIN_WINDOW": "16"}
RECTIFIED = ENV | {"DUSTIN_RECTIFY_INTERVAL": "8"}
PROMPTS = {"a": tokens(150, seed=1), "b": tokens(90, seed=2), "c": tokens(60, seed=3)}


def kv(engine: Engine, req: Any, length: int) -> dict[str, np.ndarray]:
    """K and V of all layers at the first `length` positions of a running request, by model."""
    slots = engine.target.req_to_token_pool.req_to_token[req.req_pool_idx, :length].long()
    result = {}
    for role, runner in (("target", engine.target), ("draft", engine.worker._draft_worker.draft_runner)):
        pool = runner.token_to_kv_pool
        layers = range(runner.model_config.num_hidden_layers)
        parts = [get(layer)[slots] for layer in layers for get in (pool.get_key_buffer, pool.get_value_buffer)]
        result[role] = torch.stack(parts).numpy()
    return result


def snapshot(engine: Engine, req: Any) -> dict[str, Any]:
    """Tokens and KV of a running request that the host knows, and how much of it is exact."""
    ids = list(req.origin_input_ids) + list(req.output_ids)
    return dict(ids=ids, exact=exact_len(req, len(ids) - 1), kv=kv(engine, req, len(ids) - 1))


def running(
    arguments: dict[str, Any], prompts: dict[str, list[int]], new_tokens: int, steps: int, abort: str | None = None
) -> list[dict[str, Any]]:
    """Snapshots of all requests that run after `steps` batches; then the rest, and no slot is lost."""
    from sglang.srt.managers.io_struct import AbortReq

    engine = Engine(**arguments)
    for rid, ids in prompts.items():
        engine.add(rid, ids, new_tokens)
    for step in range(steps):
        if abort is not None and step == steps - 4:
            engine.scheduler.abort_request(AbortReq(rid=abort))
        engine.step()
    taken = [snapshot(engine, req) for req in engine.scheduler.running_batch.reqs if not req.finished()]
    engine.run()
    assert engine.leaked() == 0
    return taken


def prefilled(arguments: dict[str, Any], snapshots: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    """KV of the exact part of each snapshot when an engine prefills its tokens, alone."""
    engine, result = Engine(**arguments), []
    for i, taken in enumerate(snapshots):
        engine.add(str(i), taken["ids"][: taken["exact"] + 1], 1 + 4)
        engine.step()
        result.append(kv(engine, engine.request(str(i)), taken["exact"]))
        engine.run()
    return result


def assert_exact(models: dict[str, str], kind: str, snapshots: list[dict[str, Any]]) -> None:
    expected = in_child(prefilled, dustin(models, kind), snapshots, env=ENV)
    for taken, fresh in zip(snapshots, expected, strict=True):
        for role in ("target", "draft"):
            np.testing.assert_allclose(taken["kv"][role][:, : taken["exact"]], fresh[role], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "kind, shape, page_size, drafting",
    [
        ("standalone", {}, 1, "off"),
        pytest.param("standalone", TREE, 16, "all", marks=pytest.mark.slow),
        pytest.param("eagle", {}, 16, "off", marks=pytest.mark.slow),
        ("eagle", TREE, 1, "all"),
        ("eagle3", {}, 1, "all"),
        pytest.param("eagle3", TREE, 16, "off", marks=pytest.mark.slow),
    ],
)
def test_rectified_kv_is_that_of_a_fresh_prefill(
    models: dict[str, str], kind: str, shape: dict[str, int], page_size: int, drafting: str
) -> None:
    # Several requests, prefilled in chunks, of which some rows of a pass are due and others are not.
    arguments = dustin(models, kind, page_size=page_size, chunked_prefill_size=64, **shape)
    env = {"DUSTIN_SPARSE_DRAFT": drafting}
    taken = in_child(running, arguments, PROMPTS, 80, 28, env=RECTIFIED | env)
    assert len(taken) == len(PROMPTS)
    for snap, prompt in zip(sorted(taken, key=lambda s: -len(s["ids"])), PROMPTS.values(), strict=True):
        committed = len(snap["ids"]) - 1
        assert snap["exact"] >= len(prompt) + 16, "two passes at least"
        assert committed - snap["exact"] < 8 + 4, "the rest waits for its own pass"
    assert_exact(models, kind, taken)


@pytest.mark.parametrize("kind", ["standalone", "eagle"])
def test_without_it_the_same_kv_is_approximate(models: dict[str, str], kind: str) -> None:
    taken = in_child(
        running, dustin(models, kind), {"a": PROMPTS["a"]}, 80, 20, env=ENV | {"DUSTIN_SPARSE_DRAFT": "all"}
    )
    assert taken[0]["exact"] == len(PROMPTS["a"])
    exact = len(taken[0]["ids"]) - 1
    fresh = in_child(prefilled, dustin(models, kind), [taken[0] | {"exact": exact}], env=ENV)[0]
    for role in ("target", "draft"):
        difference = np.abs(taken[0]["kv"][role] - fresh[role])[:, len(PROMPTS["a"]) : exact].max(axis=(0, 2, 3))
        assert (difference > 0.05).mean() > 0.9, role


def test_abort_and_retraction_leave_exact_kv_and_no_lost_slot(models: dict[str, str]) -> None:
    arguments = dustin(models)
    taken = in_child(running, arguments, PROMPTS, 80, 24, "b", env=RECTIFIED)
    assert len(taken) == 2
    assert_exact(models, "standalone", taken)


def under_pressure(arguments: dict[str, Any], prompts: dict[str, list[int]]) -> list[dict[str, Any]]:
    """Snapshots of requests that were retracted and run again, with something rectified since."""
    engine = Engine(**arguments)
    for rid, ids in prompts.items():
        engine.add(rid, ids, 100)
    taken = {}
    while engine.busy:
        engine.step()
        for req in engine.scheduler.running_batch.reqs:
            if req.retraction_count and not req.finished() and not req.is_retracted:
                taken[req.rid] = snapshot(engine, req)
    engine.scheduler.on_idle()
    assert engine.leaked() == 0
    return list(taken.values())


def test_a_retracted_request_is_rectified_again(models: dict[str, str]) -> None:
    prompts = {str(i): tokens(150, seed=10 + i) for i in range(4)}
    arguments = dustin(models, max_total_tokens=704, schedule_conservativeness=0.1)
    taken = in_child(under_pressure, arguments, prompts, env=RECTIFIED)
    assert taken and all(len(snap["ids"]) - 1 - snap["exact"] < 8 + 4 for snap in taken)
    assert_exact(models, "standalone", taken)


def kept_queries(arguments: dict[str, Any]) -> list[bool]:
    """Whether each pass left the kept queries of target and draft as they were."""
    engine = Engine(**arguments)
    stores = [engine.worker._wiring.target_store, engine.worker._draft_worker.store]
    rectifier, untouched = engine.worker._rectifier, []
    rectify = rectifier.rectify

    def recorded(batch: Any) -> None:
        before, exact = [store.kept.clone() for store in stores], [exact_len(req, 10**6) for req in batch.reqs]
        rectify(batch)
        if exact != [exact_len(req, 10**6) for req in batch.reqs]:
            untouched.append(all(torch.equal(a, store.kept) for a, store in zip(before, stores, strict=True)))

    rectifier.rectify = recorded
    engine.generate(PROMPTS, 40)
    return untouched


@pytest.mark.parametrize("kind", ["standalone", "eagle"])
def test_the_kept_queries_stay_those_of_the_last_confirmed_tokens(models: dict[str, str], kind: str) -> None:
    untouched = in_child(kept_queries, dustin(models, kind), env=RECTIFIED)
    assert len(untouched) > 5 and all(untouched)


def two_turns(arguments: dict[str, Any], first: list[int], reply: int, question: list[int]) -> dict[str, Any]:
    engine = Engine(**arguments)
    answer = engine.generate({"first": first}, reply)["first"]
    second = first + answer + question
    text = engine.generate({"second": second}, reply)["second"]
    return dict(second=second, text=text, cached=engine.request("second").cached_tokens, leaked=engine.leaked())


def generate(arguments: dict[str, Any], prompts: dict[str, list[int]], new_tokens: int) -> dict[str, list[int]]:
    return Engine(**arguments).generate(prompts, new_tokens)


@pytest.mark.parametrize("kind", ["standalone", "eagle"])
def test_the_next_turn_reuses_what_was_rectified(models: dict[str, str], kind: str) -> None:
    first, reply, question = tokens(200, seed=1), 40, tokens(15, seed=2)
    result = in_child(two_turns, dustin(models, kind), first, reply, question, env=RECTIFIED)
    # Without rectification only the prompt is reused (test_radix_sharing.py); here all but the last interval and run.
    assert result["cached"] >= len(first) + reply - 8 - 4 - 1 and result["leaked"] == 0
    alone = in_child(generate, dustin(models, kind), {"alone": result["second"]}, reply, env=RECTIFIED)
    assert result["text"] == alone["alone"]


def test_within_the_budget_nothing_is_rectified(models: dict[str, str]) -> None:
    wide = {"DUSTIN_BUDGET": "4096"}
    off = in_child(generate, dustin(models), PROMPTS, 32, env=wide)
    assert in_child(counted, dustin(models), env=wide | {"DUSTIN_RECTIFY_INTERVAL": "1"}) == (off, 0)


def counted(arguments: dict[str, Any]) -> tuple[dict[str, list[int]], int]:
    """Tokens, and how many dense passes ran."""
    engine, passes = Engine(**arguments), []
    rewrite = engine.worker._draft_worker.rewrite
    engine.worker._draft_worker.rewrite = lambda *args: (passes.append(1), rewrite(*args))
    return engine.generate(PROMPTS, 32), len(passes)
