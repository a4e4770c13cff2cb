"""Approximate KV made wrong on purpose reaches no other request: not its logits, not its lists.

Before every batch, all KV of one request beyond its exact length is overwritten. Requests beside it and after it, which
share its prompt and go on from its answer, must be told from nothing else than a server of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from launch import TREE, dustin, tokens
from scheduler_harness import Engine, in_child

from dustin_sglang.radix import exact_len

ENV = {"DUSTIN_BUDGET": "40", "DUSTIN_WINDOW": "8"}
PREFIX = tokens(80, seed=1)
ROLES = ("target", "draft")
SOURCE = "source"


class Witness:
    """Logits and lists of every request, in the order in which they came."""

    def __init__(self, engine: Engine) -> None:
        self.logits: dict[str, list[np.ndarray]] = {}
        self.lists: dict[str, list[Any]] = {}
        self._run_batch, self._select = engine.scheduler.run_batch, engine.worker._select
        engine.scheduler.run_batch, engine.worker._select = self.run_batch, self.select

    def run_batch(self, batch: Any, *args: Any) -> Any:
        result = self._run_batch(batch, *args)
        rows = result.logits_output.next_token_logits.unflatten(0, (len(batch.reqs), -1))
        for req, own in zip(batch.reqs, rows.numpy().copy(), strict=True):
            self.logits.setdefault(req.rid, []).append(own)
        return result

    def select(self, batch: Any, **kwargs: Any) -> Any:
        selection = self._select(batch, **kwargs)
        for i, req in enumerate(batch.reqs):
            listed = selection.positions[:, i].tolist() if selection.sparse[i] else None
            self.lists.setdefault(req.rid, []).append((int(batch.seq_lens_cpu[i]), listed))
        return selection


def poison(engine: Engine, roles: tuple[str, ...]) -> int:
    """Overwrite the approximate KV of the source; return how many positions that were."""
    req = engine.request(SOURCE)
    if req.finished() or req.req_pool_idx is None:
        return 0
    start, end = exact_len(req, req.kv_committed_len), req.kv_committed_len
    slots = engine.target.req_to_token_pool.req_to_token[req.req_pool_idx, start:end].long()
    runners = {"target": engine.target, "draft": engine.worker._draft_worker.draft_runner}
    for role in roles:
        pool = runners[role].token_to_kv_pool
        for layer in range(runners[role].model_config.num_hidden_layers):
            for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
                noise = torch.randn(buffer[slots].shape, generator=torch.Generator().manual_seed(layer))
                buffer[slots] = 30 * noise
    return end - start


def beside_poison(arguments: dict[str, Any], roles: tuple[str, ...]) -> dict[str, Any]:
    """The source, requests beside it, and a second turn on its answer; their prompts, logits and lists."""
    engine = Engine(**arguments)
    witness = Witness(engine)
    prompts = {"beside": PREFIX + tokens(40, seed=3), "same": PREFIX + tokens(60, seed=2)}
    engine.add(SOURCE, prompts["same"], 40)
    poisoned = 0
    while engine.busy:
        if len(engine.request(SOURCE).output_ids) > 8 and not engine._requests.keys() & prompts.keys():
            for rid, ids in prompts.items():
                engine.add(rid, ids, 16)
        poisoned = max(poisoned, poison(engine, roles))
        engine.step()
    # Both go on from the answer: one from its end, one from its middle.
    answer = engine.output(SOURCE)
    prompts["turn"] = prompts["same"] + answer + tokens(10, seed=4)
    prompts["fork"] = prompts["same"] + answer[:20] + tokens(10, seed=5)
    for rid in ("turn", "fork"):
        engine.add(rid, prompts[rid], 16)
    engine.run()
    cached = {rid: engine.request(rid).cached_tokens for rid in prompts}
    return dict(prompts=prompts, poisoned=poisoned, cached=cached, logits=witness.logits, lists=witness.lists)


def each_alone(arguments: dict[str, Any], prompts: dict[str, list[int]]) -> dict[str, Any]:
    """The same requests one by one, over an empty tree."""
    engine = Engine(**arguments)
    witness = Witness(engine)
    for rid, ids in prompts.items():
        engine.generate({rid: ids}, 16)
        assert engine.scheduler.flush_cache()
    return dict(logits=witness.logits, lists=witness.lists)


def far_off(result: dict[str, Any], reference: dict[str, Any]) -> set[str]:
    """Requests whose logits or lists are not those of the reference."""
    wrong = set()
    for rid in result["prompts"]:
        logits, expected = result["logits"][rid], reference["logits"][rid]
        same = len(logits) == len(expected) and all(
            np.allclose(a, b, rtol=0, atol=1e-3) for a, b in zip(logits, expected, strict=True)
        )
        if not same or result["lists"][rid] != reference["lists"][rid]:
            wrong.add(rid)
    return wrong


@pytest.mark.parametrize(
    "kind, page_size, shape, settings",
    [
        pytest.param("standalone", 1, {}, {}, marks=pytest.mark.slow),
        ("standalone", 16, TREE, {"DUSTIN_SPARSE_DRAFT": "all", "DUSTIN_POLICY": "lookahead"}),
        ("standalone", 1, {}, {"DUSTIN_RECTIFY_INTERVAL": "8", "DUSTIN_SPARSE_DRAFT": "all"}),
        ("eagle", 1, TREE, {"DUSTIN_SPARSE_DRAFT": "all"}),
        pytest.param("eagle", 16, {}, {"DUSTIN_RECTIFY_INTERVAL": "8"}, marks=pytest.mark.slow),
        pytest.param("eagle3", 1, {}, {"DUSTIN_POLICY": "lookahead"}, marks=pytest.mark.slow),
    ],
)
def test_poisoned_kv_changes_no_other_request(
    models: dict[str, str], kind: str, page_size: int, shape: dict[str, int], settings: dict[str, str]
) -> None:
    arguments = dustin(models, kind, page_size=page_size, **shape)
    result = in_child(beside_poison, arguments, ROLES, env=ENV | settings)
    assert result["poisoned"] >= 4
    assert all(n >= (len(PREFIX) - 1) // page_size * page_size for n in result["cached"].values()), result["cached"]
    reference = in_child(each_alone, arguments, result["prompts"], env=ENV | settings)
    assert far_off(result, reference) == set()


@pytest.mark.parametrize("role", ROLES)
def test_the_poison_is_seen_where_approximate_kv_is_shared(models: dict[str, str], role: str) -> None:
    env = ENV | {"DUSTIN_POLICY": "lookahead", "DUSTIN_RADIX": "shared"}
    result = in_child(beside_poison, dustin(models), (role,), env=env)
    reference = in_child(each_alone, dustin(models), result["prompts"], env=env)
    # Those that read on from the answer; the prompt itself is exact here too.
    assert far_off(result, reference) == {"turn", "fork"}
