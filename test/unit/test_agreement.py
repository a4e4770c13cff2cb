"""Arithmetic of the monitor: recent agreement, compared logits, what lists catch, and what a request is told."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dustin_sglang.monitor import RECENT_TOKENS, Agreement, agreement_of, compare_rows, tell
from dustin_sglang.selection.measures import captured_mass, measure, overlap
from dustin_sglang.selection.policies import POLICIES, Budget


def test_agreement_is_that_of_the_recent_tokens() -> None:
    state = Agreement()
    assert state.share is None and not state.complete
    state.add(1.0, 4)
    assert state.share == 0.25 and not state.complete
    for _ in range(RECENT_TOKENS // 4):
        state.add(3.0, 4)
    assert state.complete and state.share == 0.75, "the first four tokens are forgotten"


def test_older_tokens_count_until_newer_ones_suffice() -> None:
    state = Agreement()
    state.add(0.0, RECENT_TOKENS - 1)
    state.add(4.0, 4)
    assert state.share == 4 / (RECENT_TOKENS + 3)


def test_compared_logits_by_hand() -> None:
    dense = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.6, 0.2]]))
    sparse = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.6, 0.2]])) + 7  # a constant changes nothing
    same, kl = compare_rows(dense, sparse).unbind(1)
    assert same.tolist() == [0, 1]
    assert kl.tolist() == pytest.approx([0.5 * math.log(2) - 0.25 * math.log(2), 0.0], abs=1e-5)


def test_compared_logits_do_not_depend_on_how_many_there_are() -> None:
    generator = torch.Generator().manual_seed(0)
    dense, sparse = torch.randn(2, 200, 11, generator=generator)
    expected = torch.cat([compare_rows(dense[i : i + 1], sparse[i : i + 1]) for i in range(200)])
    torch.testing.assert_close(compare_rows(dense, sparse), expected)


def test_captured_mass_counts_listed_positions_once() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 1.0, 0.0, 0.0]])
    positions = torch.tensor([[0, 3, -1], [0, 1, -1]], dtype=torch.int32)
    assert captured_mass(scores, positions).tolist() == [0.5, 1.0]


@pytest.mark.parametrize("second, share", [([5, 3, 4], 1.0), ([5, 3, 6], 2 / 3), ([6, 7, 8], 0.0)])
def test_overlap_compares_the_best_unprotected_positions(second: list[int], share: float) -> None:
    # Positions 0 and 1 are sinks and 10 and 11 the window; both signals prefer them, which does not count.
    budget, seq_lens = Budget(total=10, sinks=2, window=2, lookahead=3), torch.tensor([12])
    lookahead, history = torch.zeros(2, 1, 12)
    for scores, best in ((lookahead, [3, 4, 5]), (history, second)):
        scores[0, [0, 1, 10, 11]] = 9.0
        scores[0, best] = 1.0
    assert overlap(budget, lookahead, history, seq_lens).item() == pytest.approx(share)


@pytest.mark.parametrize(
    ("name", "share", "same"), [("hybrid-sum", 0.5, 1.0), ("hybrid", 0.5, 1.0), ("hybrid", 0, 0.0)]
)
def test_overlap_is_that_of_what_lookahead_counts_for_also_where_nothing_is_protected(
    name: str, share: float, same: float
) -> None:
    scores = torch.rand(1, 1, 48, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(8, dtype=torch.int32).view(1, 1, 8)
    found = measure(POLICIES[name]().budget(8, 0, 0, share), positions, scores, scores, torch.tensor([48])).present()
    assert found["overlap"].tolist() == [same]


def test_signals_that_a_policy_does_not_use_are_not_measured() -> None:
    budget, positions = Budget(total=2, sinks=0, window=0, lookahead=0), torch.tensor([[[0, 2]]], dtype=torch.int32)
    found = measure(budget, positions, None, torch.tensor([[[1.0, 2.0, 1.0]]]), torch.tensor([3])).present()
    assert {name: value.tolist() for name, value in found.items()} == {"history": [0.5]}


def test_shares_are_means_over_groups_and_history_is_that_of_the_scored_ones() -> None:
    budget, seq_lens = Budget(total=2, sinks=0, window=0, lookahead=1), torch.tensor([4])
    positions = torch.tensor([[[0, 1]], [[2, 3]], [[0, 3]]], dtype=torch.int32)
    lookahead, history = torch.tensor([[4.0, 3, 2, 1]]), torch.tensor([[[1.0, 1, 2, 6]], [[9.0, 1, 0, 0]]])
    found = measure(budget, positions, lookahead, history, seq_lens).present()
    # Lookahead 0.7, 0.3 and 0.5; history 0.8 and 0.9; the best by lookahead is 0, by history 3 and 0.
    assert {name: round(value.item(), 3) for name, value in found.items()} == {
        "lookahead": 0.5,
        "history": 0.85,
        "overlap": 0.5,
    }


def request(output: int) -> Any:
    return SimpleNamespace(output_ids=list(range(output)), customized_info=None)


def test_tokens_already_sent_keep_what_they_were_told() -> None:
    req = request(1)
    tell(req, 4)
    agreement_of(req).add(1.0, 2)
    req.output_ids += [0, 0]
    tell(req, 4)
    assert req.customized_info["dustin_agreement"] == [None] * 3 + [0.5] * 4
    agreement_of(req).dense = True
    tell(req, 4)
    assert req.customized_info["dustin_dense"] == [False] * 3 + [True] * 4
