"""Rectification and the monitor where only a GPU shows them: overlap scheduling, CUDA graphs, both kernels."""

from __future__ import annotations

from typing import Any

import pytest

engines = pytest.importorskip("engines", reason="needs SGLang with CUDA", exc_type=ImportError)
from test_exactness import NEW_TOKENS, check, prompts, real_prompt, tokenizer  # noqa: E402

pytestmark = pytest.mark.gpu

SPARSE = {"DUSTIN_BUDGET": "512"}
INTERVAL, REPLY, WIDTH = 32, 128, 4


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"disable_overlap_schedule": True}, {"disable_cuda_graph": True}, {"page_size": 16}],
    ids=["graphs and overlap", "no overlap", "no graphs", "page size 16"],
)
def test_the_next_turn_reuses_rectified_tokens_and_answers_as_without_a_cache(kwargs: dict[str, Any]) -> None:
    first, page = real_prompt(), kwargs.get("page_size", 1)
    with engines.engine("dustin", env=SPARSE | {"DUSTIN_RECTIFY_INTERVAL": str(INTERVAL)}, **kwargs) as running:
        answer = engines.greedy(running, [first], REPLY)[0]["ids"]
        second = [first + answer + tokenizer().encode("\nWhere was that said?\n")]
        sampling = dict(temperature=0, max_new_tokens=1)
        cached = running.generate(input_ids=second, sampling_params=sampling)[0]["meta_info"]["cached_tokens"]
        again = engines.greedy(running, second, NEW_TOKENS)
        running.flush_cache()
        fresh = engines.greedy(running, second, NEW_TOKENS)
    assert cached > len(first) + REPLY - INTERVAL - 3 * WIDTH - page, "all but what was still to be rectified"
    check("over rectified KV", again, fresh)


def monitored(env: dict[str, str], **kwargs: Any) -> list[dict[str, Any]]:
    sampling = dict(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    with engines.engine("dustin", env=SPARSE | env, **kwargs) as running:
        return [out["meta_info"] for out in running.generate(input_ids=prompts(), sampling_params=sampling)]


@pytest.mark.parametrize("attention", ["dustin", "flashinfer"])
def test_monitoring_changes_no_token(attention: str) -> None:
    runs = []
    for interval in ("0", "1"):
        env = SPARSE | {"DUSTIN_ATTENTION": attention, "DUSTIN_MONITOR_INTERVAL": interval}
        with engines.engine("dustin", env=env) as running:
            runs.append(engines.greedy(running, prompts(), NEW_TOKENS))
    check("monitored", runs[1], runs[0])


@pytest.mark.parametrize("attention", ["dustin", "flashinfer"])
@pytest.mark.parametrize("kwargs", [{}, {"disable_cuda_graph": True}], ids=["graphs", "no graphs"])
def test_long_requests_turn_dense_beside_short_ones(attention: str, kwargs: dict[str, Any]) -> None:
    # A threshold of 1: the first disagreement among enough tokens counts.
    env = {"DUSTIN_ATTENTION": attention, "DUSTIN_MONITOR_INTERVAL": "1", "DUSTIN_DENSE_FALLBACK": "1"}
    metas = monitored(env | {"DUSTIN_BUDGET": "96", "DUSTIN_POLICY": "streaming"}, **kwargs)
    for prompt, meta in zip(prompts(), metas, strict=True):
        agreement, dense = meta["dustin_agreement"], meta["dustin_dense"]
        assert len(agreement) == len(dense) == NEW_TOKENS and dense == sorted(dense)
        if len(prompt) + NEW_TOKENS <= 96:
            assert agreement == [None] * NEW_TOKENS and not any(dense)
        else:
            assert 0 <= agreement[-1] <= 1
    assert any(meta["dustin_dense"][-1] for meta in metas), "a window of 92 tokens loses something of random texts"
