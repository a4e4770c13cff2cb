"""Lists that end by mass in a launch: they are shorter, they are what is read, and metrics know them a step later."""

from __future__ import annotations

from typing import Any

import pytest
from launch import TREE, dustin, tokens
from scheduler_harness import Engine, in_child

from dustin_sglang import metrics

PROMPTS = {"a": tokens(150, seed=1), "b": tokens(90, seed=2), "c": tokens(20, seed=3)}
ENV = {"DUSTIN_BUDGET": "60", "DUSTIN_WINDOW": "16"}
FLOOR = 4 + 16 + 40 // 8


def run(arguments: dict[str, Any], new_tokens: int = 24) -> dict[str, Any]:
    """Generate; for every verification the number of slots that each request's segments hold in each group."""
    from prometheus_client import REGISTRY

    metrics.enable()
    engine = Engine(**arguments)
    backend, verify, reads, kept = engine.worker._wiring.target_backend, engine.worker.verify, [], []

    def recorded(batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = verify(batch, *args, **kwargs)
        selection = backend._selection
        lengths = batch.seq_lens_cpu.tolist()
        listed = [[segment.slots.numel() for segment in segments] for segments in backend._listed]
        counts = selection.counts if selection.kept is None else selection.kept.tolist()
        reads.append((lengths, listed, counts, selection.sparse))
        kept.append(sum(n for n, sparse in zip(counts, selection.sparse, strict=True) if sparse))
        return result

    engine.worker.verify = recorded
    answers = engine.generate(PROMPTS, new_tokens)
    counted = REGISTRY.get_sample_value("dustin:selected_positions_total")
    return dict(answers=answers, reads=reads, kept=kept, counted=counted, leaked=engine.leaked())


@pytest.mark.parametrize(
    "kind, shape, drafting, groups",
    [("standalone", {}, "all", 2), ("standalone", TREE, "off", 1), ("eagle", TREE, "all", 2)],
)
def test_lists_end_between_the_floor_and_the_budget(
    models: dict[str, str], kind: str, shape: dict[str, int], drafting: str, groups: int
) -> None:
    env = ENV | {"DUSTIN_MASS": "0.4", "DUSTIN_LAYER_GROUPS": str(groups), "DUSTIN_SPARSE_DRAFT": drafting}
    result = in_child(run, dustin(models, kind, page_size=16, **shape), env=env)
    g = shape.get("speculative_num_draft_tokens", 4)
    seen = set()
    for lengths, listed, counts, sparse in result["reads"]:
        assert len(listed) == groups
        for group in listed:
            assert group == [count + g for count in counts], "the segments hold the list and the tokens verified"
        for n, count, partly in zip(lengths, counts, sparse, strict=True):
            assert FLOOR <= count <= 60 if partly else count == n
            seen |= {count} if partly else set()
    assert len(seen) > 5 and min(seen) < 50, "counts differ from step to step"
    assert result["leaked"] == 0
    # Under Prometheus the last verification's list is counted at the next one, and there is none.
    assert result["counted"] == sum(result["kept"][:-1])


def test_with_all_of_the_mass_lists_are_those_without_the_flag(models: dict[str, str]) -> None:
    runs = [in_child(run, dustin(models), env=ENV | extra) for extra in ({}, {"DUSTIN_MASS": "1"})]
    assert runs[0]["answers"] == runs[1]["answers"] and runs[0]["reads"] == runs[1]["reads"]
    assert {n for _, _, counts, sparse in runs[0]["reads"] for n, s in zip(counts, sparse) if s} == {60}


@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
def test_a_request_within_the_budget_is_exact_whatever_the_mass(models: dict[str, str], shape: dict[str, int]) -> None:
    answers = {}
    for policy, mass in (("dense", "1"), ("hybrid", "0.05")):
        env = ENV | {"DUSTIN_POLICY": policy, "DUSTIN_MASS": mass, "DUSTIN_SPARSE_DRAFT": "all"}
        answers[policy] = in_child(run, dustin(models, **shape), env=env)["answers"]
    assert answers["hybrid"]["c"] == answers["dense"]["c"]
    assert answers["hybrid"]["a"] != answers["dense"]["a"], "beyond the budget so small a mass shows"
