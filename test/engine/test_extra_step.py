"""Every verified token has a query that looks ahead for it: the draft's own, as in a plain forward over all tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch import CHAIN, TREE, dustin, tokens
from scheduler_harness import Engine, in_child

from dustin_sglang.calibrate.trace import Layer, TracedModel

PROMPTS, NEW_TOKENS, STEPS = {"a": tokens(90, 1), "b": tokens(140, 2)}, 12, CHAIN["speculative_num_steps"]
ENV = {"DUSTIN_BUDGET": "40", "DUSTIN_SINKS": "2", "DUSTIN_WINDOW": "8"}


def looked(models: dict[str, str], changes: dict[str, Any]) -> dict[str, Any]:
    """Run two requests; what each verification had: committed length, drafted tokens, queries by layer and head."""
    engine = Engine(**dustin(models, **changes))
    wiring, draft = engine.worker._wiring, engine.worker._draft_worker
    verify, seen = type(engine.worker).verify, []

    def recorded(worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        queries = draft.store.queries(batch.req_pool_indices.long())
        drafted = batch.spec_info.draft_token.view(len(batch.reqs), -1)
        for req, n, ids, rows in zip(batch.reqs, batch.seq_lens_cpu.tolist(), drafted.tolist(), queries, strict=True):
            seen.append((req.rid, n, ids, rows.tolist()))
        return verify(worker, batch, *args, **kwargs)

    type(engine.worker).verify = recorded
    answers = engine.generate(PROMPTS, NEW_TOKENS)
    return dict(answers=answers, seen=seen, heads=wiring.profile.lookahead.by_layer, line=wiring._drafting())


def queries_of(folder: str, ids: list[int], heads: tuple[tuple[int, tuple[int, ...]], ...]) -> torch.Tensor:
    """The draft's queries ``[tokens - 1, heads, head_dim]`` for every token but the first, which it never reads."""
    found: dict[int, torch.Tensor] = {}

    def see(layer: Layer) -> None:
        found[layer.index] = layer.q.transpose(0, 1)

    TracedModel(Path(folder), "cpu", torch.float32).read(ids[1:], see, [0])
    return torch.cat([found[layer][:, list(chosen)] for layer, chosen in heads], dim=1)


@pytest.mark.parametrize("changes", [{}, {"page_size": 16}], ids=["page 1", "page 16"])
def test_each_verified_token_looks_ahead(models: dict[str, str], changes: dict[str, Any]) -> None:
    result = in_child(looked, models, changes, env=ENV)
    assert result["line"] == "every position, one step further to look ahead"
    assert len(result["seen"]) > 6
    for rid, n, drafted, rows in result["seen"]:
        assert len(rows) == len(drafted) == STEPS + 1
        committed = (PROMPTS[rid] + result["answers"][rid])[:n]
        if len(committed) < n:
            continue  # a run accepted past the last token asked for
        expected = queries_of(models["standalone"], committed + drafted, result["heads"])[n - 1 :]
        own = torch.tensor(rows)
        torch.testing.assert_close(own[-1], expected[0])  # the last confirmed token's, kept since the draft extend
        torch.testing.assert_close(own[:-1], expected[1:])


def test_off_gives_the_same_drafts_without_the_last_query(models: dict[str, str]) -> None:
    env = ENV | {"DUSTIN_POLICY": "lookahead", "DUSTIN_BUDGET": "4096"}  # everything is read: the answers must agree
    on, off = (in_child(looked, models, {}, env=env | {"DUSTIN_EXTRA_STEP": mode}) for mode in ("auto", "off"))
    assert on["answers"] == off["answers"] and off["line"] == "every position"
    for (rid, n, drafted, rows), (*other, fewer) in zip(on["seen"], off["seen"], strict=True):
        assert [rid, n, drafted] == other and len(rows) == len(fewer) + 1
        torch.testing.assert_close(torch.tensor(rows[: STEPS - 1] + rows[-1:]), torch.tensor(fewer))


@pytest.mark.parametrize(
    "kind, changes, policy",
    [("standalone", TREE, "hybrid"), ("eagle", CHAIN, "hybrid"), ("standalone", CHAIN, "history")],
    ids=["tree", "head", "no lookahead"],
)
def test_there_is_no_extra_step_where_it_cannot_be_or_serves_nothing(
    models: dict[str, str], kind: str, changes: dict[str, Any], policy: str
) -> None:
    changes = changes | {"speculative_draft_model_path": models[kind]}
    result = in_child(looked, models, changes, env=ENV | {"DUSTIN_POLICY": policy})
    assert result["line"] == "every position"
    branches = changes["speculative_eagle_topk"]
    assert {len(rows) for *_, rows in result["seen"]} == {(STEPS - 1) * branches + 1}
