"""A budget of at least the context gives the tokens of dense speculation and of no speculation, in every mode.

vLLM #7627 and #41758, mlx-lm #1423: greedy output that differs with speculation.
"""

from __future__ import annotations

from typing import Any

import pytest
from launch import TREE, dustin, plain, stock, tokens
from scheduler_harness import Engine, in_child

BUDGET = 320
# Around the budget: the last but one crosses it while it generates, the last one starts beyond it.
PROMPTS = {str(n): tokens(n, seed=n) for n in (5, 60, 200, BUDGET - 20, BUDGET + 30)}
NEW_TOKENS = 32


def generate(arguments: dict[str, Any], prompts: dict[str, list[int]], new_tokens: int) -> dict[str, Any]:
    engine = Engine(**arguments)
    first = engine.generate(prompts, new_tokens)
    again = engine.generate({f"again {rid}": ids for rid, ids in prompts.items()}, new_tokens)
    cached = {rid: engine.request(f"again {rid}").cached_tokens for rid in prompts}
    return dict(first=first, again=list(again.values()), cached=cached, steps=engine.steps, leaked=engine.leaked())


@pytest.fixture(scope="module")
def dense(models: dict[str, str]) -> dict[str, list[int]]:
    result = in_child(generate, plain(models), PROMPTS, NEW_TOKENS)
    return result["first"]


@pytest.mark.parametrize("kind", ["standalone", "eagle", "eagle3"])
@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_dense_budget_gives_dense_tokens(
    models: dict[str, str], dense: dict[str, list[int]], kind: str, shape: dict[str, int], page_size: int
) -> None:
    """Trees, pages and ragged runs.

    SGLang #13741 and PR #13826,
    sglang-jax #1147: slots lost by every request at larger pages; arXiv 2510.22876: ragged runs in one batch.
    """
    # Several concurrent requests, a prefill in chunks, and everything once more over the radix cache.
    arguments = dustin(models, kind, page_size=page_size, chunked_prefill_size=64, **shape)
    result = in_child(generate, arguments, PROMPTS, NEW_TOKENS, env={"DUSTIN_BUDGET": "4096"})
    assert result["first"] == dense
    assert result["again"] == list(dense.values())
    assert result["cached"]["200"] >= 180 and result["leaked"] == 0
    assert result["steps"] < 2 * (NEW_TOKENS + 15), "no draft was ever accepted"


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_tree_of_four_branches_gives_dense_tokens(
    models: dict[str, str], dense: dict[str, list[int]], kind: str
) -> None:
    """SGLang #13352: at topk 4, hidden states and embeddings of the draft extend differ in size."""
    wide = dict(speculative_num_steps=3, speculative_eagle_topk=4, speculative_num_draft_tokens=8)
    result = in_child(generate, dustin(models, kind, **wide), PROMPTS, NEW_TOKENS, env={"DUSTIN_BUDGET": "4096"})
    assert result["first"] == dense and result["leaked"] == 0


@pytest.mark.parametrize(
    "kind, mode, shape, page_size",
    [
        ("standalone", "all", {}, 16),
        ("standalone", "all", TREE, 16),
        ("standalone", "unscored", TREE, 1),
        ("eagle", "all", {}, 1),
        ("eagle3", "all", TREE, 16),
    ],
)
def test_a_sparse_draft_drafts_as_a_dense_one_within_the_budget(
    models: dict[str, str],
    dense: dict[str, list[int]],
    kind: str,
    mode: str,
    shape: dict[str, int],
    page_size: int,
) -> None:
    arguments = dustin(models, kind, page_size=page_size, chunked_prefill_size=64, **shape)
    steps = {}
    for drafting in ("off", mode):
        env = {"DUSTIN_BUDGET": "4096", "DUSTIN_SPARSE_DRAFT": drafting}
        result = in_child(generate, arguments, PROMPTS, NEW_TOKENS, env=env)
        assert result["first"] == dense
        assert result["again"] == list(dense.values())
        assert result["leaked"] == 0
        steps[drafting] = result["steps"]
    assert steps["off"] == steps[mode], "as many verifications: the drafts are the same"


@pytest.mark.parametrize("policy", ["hybrid-sum", "hybrid-depth", "quest", "snapkv"])
def test_every_scoring_policy_is_exact_up_to_the_budget(
    models: dict[str, str], dense: dict[str, list[int]], policy: str
) -> None:
    env = {"DUSTIN_BUDGET": "4096", "DUSTIN_POLICY": policy}
    if policy == "hybrid-depth":
        env["DUSTIN_LAYER_GROUPS"] = "2"
    result = in_child(generate, dustin(models), PROMPTS, NEW_TOKENS, env=env)
    assert result["first"] == dense and result["leaked"] == 0


@pytest.mark.parametrize("groups", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind, shape, page_size, drafting",
    [("standalone", {}, 16, "all"), ("standalone", TREE, 1, "off"), ("eagle", TREE, 16, "off")],
)
def test_lists_of_layer_groups_are_exact_up_to_the_budget(
    models: dict[str, str],
    dense: dict[str, list[int]],
    groups: int,
    kind: str,
    shape: dict[str, int],
    page_size: int,
    drafting: str,
) -> None:
    arguments = dustin(models, kind, page_size=page_size, chunked_prefill_size=64, **shape)
    env = {"DUSTIN_LAYER_GROUPS": str(groups), "DUSTIN_SPARSE_DRAFT": drafting}
    whole = in_child(generate, arguments, PROMPTS, NEW_TOKENS, env=env | {"DUSTIN_BUDGET": "4096"})
    assert whole["first"] == dense and whole["again"] == list(dense.values()) and whole["leaked"] == 0
    # Requests within the budget are exact beside sparse ones.
    beside = in_child(generate, arguments, PROMPTS, NEW_TOKENS, env=env | {"DUSTIN_BUDGET": str(BUDGET)})
    within = [rid for rid in PROMPTS if len(PROMPTS[rid]) + NEW_TOKENS <= BUDGET]
    assert {rid: beside["first"][rid] for rid in within} == {rid: dense[rid] for rid in within}
    assert beside["leaked"] == 0


@pytest.mark.parametrize("kind", ["standalone", "eagle", "eagle3"])
def test_dense_speculation_of_sglang_agrees_too(models: dict[str, str], dense: dict[str, list[int]], kind: str) -> None:
    for shape in ({}, TREE):
        result = in_child(generate, stock(models, kind, **shape), PROMPTS, NEW_TOKENS)
        assert result["first"] == dense


@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
def test_requests_within_the_budget_are_exact_beside_sparse_ones(
    models: dict[str, str], dense: dict[str, list[int]], shape: dict[str, int]
) -> None:
    result = in_child(generate, dustin(models, **shape), PROMPTS, NEW_TOKENS, env={"DUSTIN_BUDGET": str(BUDGET)})
    within = [rid for rid in PROMPTS if len(PROMPTS[rid]) + NEW_TOKENS <= BUDGET]
    assert len(within) == 3
    assert {rid: result["first"][rid] for rid in within} == {rid: dense[rid] for rid in within}
    # Up to the budget the crossing request is dense as well.
    crossing = str(BUDGET - 20)
    assert result["first"][crossing][:20] == dense[crossing][:20]
    assert result["leaked"] == 0


@pytest.mark.parametrize("drafting", ["off", "all"])
def test_the_dense_policy_is_dense_whatever_the_budget(
    models: dict[str, str], dense: dict[str, list[int]], drafting: str
) -> None:
    env = {"DUSTIN_BUDGET": "68", "DUSTIN_POLICY": "dense", "DUSTIN_SPARSE_DRAFT": drafting}
    result = in_child(generate, dustin(models), PROMPTS, NEW_TOKENS, env=env)
    assert result["first"] == dense


def test_a_budget_and_a_window_beyond_the_context_length_give_dense_tokens(models: dict[str, str]) -> None:
    prompts, length = {"a": tokens(60, 1)}, dict(context_length=128)
    expected = in_child(generate, plain(models, **length), prompts, NEW_TOKENS)["first"]
    env = {"DUSTIN_BUDGET": "4096", "DUSTIN_WINDOW": "2048", "DUSTIN_SINKS": "200"}
    assert in_child(generate, dustin(models, **length), prompts, NEW_TOKENS, env=env)["first"] == expected
