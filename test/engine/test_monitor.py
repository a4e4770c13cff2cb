"""The monitor changes nothing, measures what is so, and turns requests dense that the list fails.

What it measures is known beforehand on the model of test_draft_shift.py: dense verification finds the marker in the
middle of the prompt and says so; a list without the marker's position makes it say otherwise.
"""

from __future__ import annotations

from typing import Any

import pytest
from launch import CHAIN, TREE, dustin, tokens
from scheduler_harness import Engine, in_child
from test_draft_shift import FOUND, MARKER, MISSED, PROMPT, write_marker_model

from dustin_sglang import metrics
from dustin_sglang.monitor import agreement_of

ENV = {"DUSTIN_BUDGET": "40", "DUSTIN_WINDOW": "16"}
PROMPTS = {"a": tokens(150, seed=1), "b": tokens(90, seed=2), "c": tokens(20, seed=3)}


class Recorder(metrics.Metrics):
    """Keeps what is counted."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float, float, dict[str, float]]] = []
        self.fallbacks = 0

    def monitored(self, agreeing: float, compared: float, kl: float, shares: Any) -> None:
        self.steps.append((agreeing, compared, kl, dict(shares)))

    def fell_back(self) -> None:
        self.fallbacks += 1


def recorder() -> Recorder:
    """Count into a new recorder from now on, in this process."""
    metrics._metrics = found = Recorder()
    return found


def generate(arguments: dict[str, Any], prompts: dict[str, list[int]], new_tokens: int) -> dict[str, Any]:
    counted, engine = recorder(), Engine(**arguments)
    stores = [engine.worker._wiring.target_store, engine.worker._draft_worker.store]
    answers = engine.generate(prompts, new_tokens)
    told = {rid: engine.request(rid).customized_info for rid in prompts}
    kept = [store.kept.numpy() for store in stores]
    return dict(
        answers=answers, steps=counted.steps, told=told, kept=kept, batches=engine.steps, leaked=engine.leaked()
    )


@pytest.mark.parametrize(
    "kind, shape",
    [
        ("standalone", {}),
        ("eagle", TREE),
        pytest.param("eagle3", {}, marks=pytest.mark.slow),
        pytest.param("standalone", TREE, marks=pytest.mark.slow),
    ],
)
def test_a_monitored_request_answers_and_remembers_as_an_unmonitored_one(
    models: dict[str, str], kind: str, shape: dict[str, int]
) -> None:
    arguments = dustin(models, kind, page_size=16, chunked_prefill_size=64, **shape)
    env = ENV | {"DUSTIN_SPARSE_DRAFT": "all", "DUSTIN_RECTIFY_INTERVAL": "8"}
    off = in_child(generate, arguments, PROMPTS, 40, env=env)
    on = in_child(generate, arguments, PROMPTS, 40, env=env | {"DUSTIN_MONITOR_INTERVAL": "1"})
    assert on["answers"] == off["answers"] and on["batches"] == off["batches"]
    assert on["leaked"] == off["leaked"] == 0
    for a, b in zip(on["kept"], off["kept"], strict=True):
        assert (a == b).all(), "the dense forward left no query behind"
    assert off["steps"] == [] and off["told"]["a"] is None
    assert 0 < sum(agreeing for agreeing, *_ in on["steps"]) < sum(compared for _, compared, *_ in on["steps"])
    for agreeing, compared, kl, shares in on["steps"]:
        assert 0 <= agreeing <= compared and 1 <= compared <= 4 and kl > 0
        assert shares.keys() == {"lookahead", "history", "overlap"}
        assert all(0 < share <= 1.0001 for name, share in shares.items() if name != "overlap")
        assert 0 <= shares["overlap"] <= 1


def test_every_nth_sparse_verification_is_monitored(models: dict[str, str]) -> None:
    counts = {}
    for interval in (1, 3):
        env = ENV | {"DUSTIN_MONITOR_INTERVAL": str(interval)}
        counts[interval] = len(in_child(generate, dustin(models), {"a": PROMPTS["a"]}, 40, env=env)["steps"])
    # What the last verification showed is read at the next one, and here there is none.
    assert counts[1] >= 12 and counts[3] in (counts[1] // 3, (counts[1] + 1) // 3)


def test_it_measures_where_no_position_is_protected(models: dict[str, str]) -> None:
    env = {"DUSTIN_BUDGET": "16", "DUSTIN_SINKS": "0", "DUSTIN_WINDOW": "0", "DUSTIN_MONITOR_INTERVAL": "1"}
    result = in_child(generate, dustin(models), {"c": tokens(60, 1)}, 12, env=env)
    assert result["steps"] and any(0 < shares["overlap"] <= 1 for *_, shares in result["steps"])


def test_requests_within_the_budget_are_not_monitored(models: dict[str, str]) -> None:
    env = ENV | {"DUSTIN_MONITOR_INTERVAL": "1"}
    result = in_child(generate, dustin(models), {"c": PROMPTS["c"]}, 12, env=env)
    assert result["steps"] == []
    assert result["told"]["c"]["dustin_agreement"][:12] == [None] * 12


@pytest.fixture(scope="module")
def marker(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = write_marker_model(tmp_path_factory.mktemp("marker") / "model")
    return dict(
        model_path=model,
        speculative_algorithm="dustin",
        speculative_draft_model_path=model,
        max_total_tokens=1024,
        **CHAIN,
    )


THREE = {"DUSTIN_BUDGET": "3", "DUSTIN_SINKS": "1", "DUSTIN_WINDOW": "1", "DUSTIN_MONITOR_INTERVAL": "1"}


def test_a_list_with_the_marker_agrees_with_dense_verification(marker: dict[str, Any]) -> None:
    env = THREE | {"DUSTIN_POLICY": "lookahead"}
    result = in_child(generate, marker, {"r": PROMPT}, 24, env=env)
    assert result["answers"]["r"] == [FOUND] * 24 and len(result["steps"]) > 3
    for agreeing, compared, kl, shares in result["steps"]:
        assert agreeing == compared and kl < 1e-3
        assert shares["lookahead"] > 0.99, "the scoring heads look at the marker alone"
    assert set(result["told"]["r"]["dustin_agreement"][8:24]) == {1.0}


def test_a_list_without_it_disagrees(marker: dict[str, Any]) -> None:
    result = in_child(generate, marker, {"r": PROMPT}, 24, env=THREE | {"DUSTIN_POLICY": "streaming"})
    assert result["answers"]["r"] == [FOUND] + [MISSED] * 23
    for agreeing, compared, kl, shares in result["steps"]:
        assert agreeing == 0 < compared and kl > compared and shares == {}
    assert not any(result["told"]["r"]["dustin_dense"])


def biased(arguments: dict[str, Any]) -> tuple[list[int], list[Any]]:
    """Answer under a bias towards the other token; what the monitor found."""
    counted, engine = recorder(), Engine(**arguments)
    engine.add("r", PROMPT, 24, logit_bias={str(MISSED): 100.0})
    engine.run()
    return engine.output("r"), counted.steps


def test_a_logit_bias_does_not_count_as_disagreement(marker: dict[str, Any]) -> None:
    answer, steps = in_child(biased, marker, env=THREE | {"DUSTIN_POLICY": "lookahead"})
    assert answer == [MISSED] * 24
    assert steps and all(agreeing == compared and kl < 1e-3 for agreeing, compared, kl, _ in steps)


def told_to_be_dense(arguments: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    """One request, verified densely from the beginning, as one that was retracted and prefilled again."""
    engine = Engine(**arguments)
    engine.add("r", prompt, 24)
    agreement_of(engine.request("r")).dense = True
    engine.run()
    return dict(exact=engine.request("r").dustin_exact_len, cached=engine.tree.evictable_size())


def test_a_dense_request_still_shares_nothing_that_a_sparse_draft_wrote(models: dict[str, str]) -> None:
    env = ENV | {"DUSTIN_MONITOR_INTERVAL": "8", "DUSTIN_DENSE_FALLBACK": "0.5", "DUSTIN_SPARSE_DRAFT": "all"}
    result = in_child(told_to_be_dense, dustin(models), PROMPTS["a"], env=env)
    assert result["exact"] == len(PROMPTS["a"]) == result["cached"] + 1


def with_fallback(arguments: dict[str, Any], prompts: dict[str, list[int]], new_tokens: int) -> dict[str, Any]:
    """Generate; the positions that each verification reads of each request, as its backend is told."""
    counted, engine = recorder(), Engine(**arguments)
    backend, verify, reads = engine.worker._wiring.target_backend, engine.worker.verify, {rid: [] for rid in prompts}

    def recorded(batch: Any, *args: Any, **kwargs: Any) -> Any:
        result, selection = verify(batch, *args, **kwargs), backend._selection
        for req, count, length in zip(batch.reqs, selection.counts, batch.seq_lens_cpu.tolist(), strict=True):
            reads[req.rid].append("all" if count == length else count)
        return result

    engine.worker.verify = recorded
    answers = engine.generate(prompts, new_tokens)
    told = {rid: engine.request(rid).customized_info["dustin_dense"][:new_tokens] for rid in prompts}
    return dict(answers=answers, reads=reads, told=told, fallbacks=counted.fallbacks, leaked=engine.leaked())


@pytest.mark.parametrize("drafting", ["off", "all"])
def test_a_request_that_the_list_fails_is_verified_densely_from_then_on(marker: dict[str, Any], drafting: str) -> None:
    # The other request has no marker: its list loses nothing, and it stays sparse beside the first.
    plain = [3 if token == MARKER else token for token in PROMPT]
    env = THREE | {"DUSTIN_POLICY": "streaming", "DUSTIN_DENSE_FALLBACK": "0.5", "DUSTIN_SPARSE_DRAFT": drafting}
    result = in_child(with_fallback, marker, {"r": PROMPT, "plain": plain}, 48, env=env)
    assert result["fallbacks"] == 1 and result["leaked"] == 0
    answer = result["answers"]["r"]
    turned = answer.index(FOUND, 1)
    assert answer == [FOUND] + [MISSED] * (turned - 1) + [FOUND] * (48 - turned)
    assert 17 <= turned <= 17 + 8, "16 compared tokens, then one more round before they are known"
    reads = result["reads"]["r"]
    assert reads[0] == 3 and reads[reads.index("all") :] == ["all"] * (len(reads) - reads.index("all"))
    assert set(result["reads"]["plain"]) == {3} and result["answers"]["plain"] == [MISSED] * 48
    assert result["told"]["r"][0] is False and result["told"]["r"][-1] is True
    assert not any(result["told"]["plain"])
