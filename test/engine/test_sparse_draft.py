"""A sparse draft reads its own request's list, the tokens since, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from launch import TREE, dustin, tokens
from scheduler_harness import Engine, in_child

PROMPTS = {"a": tokens(150, seed=1), "b": tokens(90, seed=2)}
NEW_TOKENS = 16
ENV = {"DUSTIN_BUDGET": "40", "DUSTIN_WINDOW": "16", "DUSTIN_POLICY": "lookahead"}


def record_drafts(engine: Engine) -> dict[str, list[list[int]]]:
    """The tokens of every draft that a request gets, filled in while the engine runs."""
    worker, drafts = engine.worker._draft_worker, {}
    draft = worker.draft

    def recorded(batch: Any) -> Any:
        verify_input = draft(batch)
        for req, drafted in zip(batch.reqs, verify_input.draft_token.view(len(batch.reqs), -1), strict=True):
            drafts.setdefault(req.rid, []).append(drafted.tolist())
        return verify_input

    worker.draft = recorded
    return drafts


def run(arguments: dict[str, Any], poison: str) -> dict[str, Any]:
    """Generate while K and V of the draft's sparse layers are NaN in its decode steps and draft extends.

    NaN are all slots that a request's list leaves out, or one slot of the list. The lists are taken from the selections
    themselves. Scoring, which reads all of K, happens between these forwards; there the pools are whole again.
    """
    engine = Engine(**arguments)
    worker, sparse = engine.worker._draft_worker, engine.worker._wiring.sparse_draft
    pool, table = worker.draft_runner.token_to_kv_pool, worker.req_to_token_pool.req_to_token
    layers = set(range(worker.draft_runner.model_config.num_hidden_layers)) - sparse.dense_layers
    keep, chosen, poisoned_slots = sparse.keep, {}, []

    def recorded_keep(selection: Any, slots: torch.Tensor, seq_lens: torch.Tensor) -> None:
        keep(selection, slots, seq_lens)
        for b, (slot, length) in enumerate(zip(slots.tolist(), seq_lens.tolist(), strict=True)):
            chosen[slot] = (selection.positions[-1, b].tolist(), length)

    def where(batch: Any) -> torch.Tensor:
        found = []
        for slot, length in zip(batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True):
            positions, start = chosen[slot]
            listed = {p - 1 for p in positions if p} | set(range(start - 1, length))
            left_out = sorted(set(range(length)) - listed)
            poisoned_slots.append(len(left_out))
            found.append(table[slot, {"unlisted": left_out, "one listed": [positions[5] - 1], "nothing": []}[poison]])
        return torch.cat(found).long()

    def poisoned(forward: Any) -> Any:
        def call(batch: Any, *args: Any) -> Any:
            slots, saved = where(batch), []
            for layer in layers:
                for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
                    saved.append((buffer, buffer[slots].clone()))
                    buffer[slots] = float("nan")
            try:
                return forward(batch, *args)
            finally:
                for buffer, values in saved:
                    buffer[slots] = values

        return call

    sparse.keep = recorded_keep
    worker.draft = poisoned(worker.draft)
    worker._draft_extend_for_decode = poisoned(worker._draft_extend_for_decode)
    drafts = record_drafts(engine)
    try:
        outputs = engine.generate(PROMPTS, NEW_TOKENS)
    except Exception as error:  # NaN logits may be refused
        outputs = {"error": str(error)}
    return dict(outputs=outputs, drafts=drafts, left_out=min(poisoned_slots), layers=len(layers))


@pytest.mark.parametrize(
    "mode, layers, shape, page_size",
    [
        ("all", 3, {}, 1),
        ("unscored", 1, TREE, 16),
        pytest.param("all", 3, TREE, 16, marks=pytest.mark.slow),
        pytest.param("unscored", 1, {}, 1, marks=pytest.mark.slow),
    ],
)
def test_unlisted_slots_are_never_read(
    models: dict[str, str], mode: str, layers: int, shape: dict[str, int], page_size: int
) -> None:
    env = ENV | {"DUSTIN_SPARSE_DRAFT": mode}
    arguments = dustin(models, page_size=page_size, **shape)
    clean = in_child(run, arguments, "nothing", env=env)
    poisoned = in_child(run, arguments, "unlisted", env=env)
    assert poisoned["left_out"] >= 90 - 40 and poisoned["layers"] == layers
    assert poisoned["outputs"] == clean["outputs"] and poisoned["drafts"] == clean["drafts"]


def test_listed_slots_are_read(models: dict[str, str]) -> None:
    env = ENV | {"DUSTIN_SPARSE_DRAFT": "all"}
    clean = in_child(run, dustin(models), "nothing", env=env)
    poisoned = in_child(run, dustin(models), "one listed", env=env)
    assert poisoned["drafts"] != clean["drafts"]


def staggered(arguments: dict[str, Any], requests: dict[str, tuple[list[int], int]]) -> dict[str, list[list[int]]]:
    """Requests that begin one round after the other and end at different times; their drafts."""
    engine = Engine(**arguments)
    drafts = record_drafts(engine)
    for rid, (ids, new_tokens) in requests.items():
        engine.add(rid, ids, new_tokens)
        engine.step()
        engine.step()
    engine.run()
    return drafts


@pytest.mark.parametrize("mode", ["all", pytest.param("unscored", marks=pytest.mark.slow)])
def test_requests_that_come_and_go_draft_over_their_own_lists(models: dict[str, str], mode: str) -> None:
    lengths = {"a": (150, 8), "within": (25, 30), "b": (90, 40), "c": (120, 6), "d": (70, 20), "e": (110, 20)}
    requests = {rid: (tokens(n, seed=n), new) for rid, (n, new) in lengths.items()}
    env = ENV | {"DUSTIN_SPARSE_DRAFT": mode}
    # Three at a time: later requests take over the request slots of earlier ones.
    together = in_child(staggered, dustin(models, max_running_requests=3), requests, env=env)
    for rid, request in requests.items():
        assert together[rid] == in_child(staggered, dustin(models), {rid: request}, env=env)[rid], rid


def under_pressure(arguments: dict[str, Any], prompts: dict[str, list[int]], new_tokens: int) -> dict[str, Any]:
    """More than the pool holds; the output of each retracted request when it last left, and its drafts since."""
    engine = Engine(**arguments)
    drafts, before = record_drafts(engine), {}
    for rid, ids in prompts.items():
        engine.add(rid, ids, new_tokens)
    while engine.busy:
        engine.step()
        for req in engine.scheduler.waiting_queue:
            if req.retraction_count:
                before[req.rid] = list(req.output_ids)
                drafts[req.rid] = []
    engine.scheduler.on_idle()
    return dict(before=before, drafts=drafts, leaked=engine.leaked())


def test_a_retracted_request_drafts_like_a_new_one(models: dict[str, str]) -> None:
    prompts, new_tokens = {str(i): tokens(150, seed=10 + i) for i in range(4)}, 100
    env = ENV | {"DUSTIN_SPARSE_DRAFT": "all"}
    arguments = dustin(models, max_total_tokens=704, schedule_conservativeness=0.1)
    result = in_child(under_pressure, arguments, prompts, new_tokens, env=env)
    assert result["before"] and result["leaked"] == 0
    rid, before = next(iter(result["before"].items()))
    request = (prompts[rid] + before, new_tokens - len(before))
    assert result["drafts"][rid] == in_child(staggered, dustin(models), {rid: request}, env=env)[rid]


def written_sparsely(arguments: dict[str, Any], prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """Run one request across the budget; the first slot that a sparse draft extend wrote, and where exactness ended."""
    engine = Engine(**arguments)
    worker, selections = engine.worker._draft_worker, []
    extend, keep = worker._draft_extend_for_decode, engine.worker._wiring.sparse_draft.keep
    first = []

    def recorded_keep(selection: Any, *args: Any) -> None:
        selections.append(any(selection.sparse))
        keep(selection, *args)

    def recorded_extend(batch: Any, *args: Any) -> None:
        if selections[-1]:
            first.append(int(batch.seq_lens_cpu[0]))
        extend(batch, *args)

    engine.worker._wiring.sparse_draft.keep = recorded_keep
    worker._draft_extend_for_decode = recorded_extend
    engine.generate({"r": prompt}, new_tokens)
    return dict(first=first[0], exact=engine.request("r").dustin_exact_len)


@pytest.mark.parametrize("length", [30, 60], ids=["crosses the budget", "starts beyond it"])
def test_no_draft_kv_below_the_exact_length_is_written_sparsely(models: dict[str, str], length: int) -> None:
    env = ENV | {"DUSTIN_SPARSE_DRAFT": "all"}
    result = in_child(written_sparsely, dustin(models), tokens(length, seed=length), 40, env=env)
    assert result["first"] == result["exact"] >= max(length, 41)


def start(arguments: dict[str, Any]) -> None:
    Engine(**arguments)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_head_whose_only_layer_scores_refuses_unscored(models: dict[str, str], kind: str) -> None:
    with pytest.raises(RuntimeError, match="'unscored', but every layer of this draft scores.*use 'all' or 'off'"):
        in_child(start, dustin(models, kind), env=ENV | {"DUSTIN_SPARSE_DRAFT": "unscored"})
