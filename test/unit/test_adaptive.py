"""Lists that end by mass: cases by hand, and what holds for all."""

from __future__ import annotations

import pytest
import torch

from dustin_sglang.selection.adaptive import keep_mass, least
from dustin_sglang.selection.context import Context
from dustin_sglang.selection.policies import POLICIES, Budget

# Twelve positions, 0 and 11 protected, whose mass counts for nothing; of the others' 10 these hold 4, 3, 2 and 1.
BUDGET = Budget(total=6, sinks=1, window=1, lookahead=0)
SCORES = torch.tensor([[90.0, 0, 3, 0, 4, 0, 0, 1, 0, 2, 0, 90]])
LISTED = torch.tensor([[[0, 2, 4, 7, 9, 11]]], dtype=torch.int32)
LENGTH = torch.tensor([12])


def ended(mass: float) -> list[int]:
    positions, counts = keep_mass(BUDGET, mass, LISTED, None, SCORES.unsqueeze(0), LENGTH)
    listed = positions[0, 0].tolist()
    assert listed[counts[0] :] == [-1] * (6 - int(counts[0]))
    return listed[: counts[0]]


@pytest.mark.parametrize(
    "mass, listed",
    [
        (0.01, [0, 4, 11]),
        (0.4, [0, 4, 11]),
        (0.41, [0, 2, 4, 11]),
        (0.7, [0, 2, 4, 11]),
        (0.9, [0, 2, 4, 9, 11]),
        (0.95, [0, 2, 4, 7, 9, 11]),
    ],
)
def test_a_list_ends_with_the_smallest_number_that_holds_the_mass(mass: float, listed: list[int]) -> None:
    assert ended(mass) == listed


def test_a_mass_that_the_list_does_not_hold_leaves_it_whole() -> None:
    scores = SCORES.clone()
    scores[0, [1, 3, 5]] = 5.0  # unlisted
    positions, counts = keep_mass(BUDGET, 0.5, LISTED, None, scores.unsqueeze(0), LENGTH)
    assert torch.equal(positions, LISTED) and counts.tolist() == [6]


def test_two_signals_count_alike_whatever_their_scale() -> None:
    """History's shares are 0.3, 0.4, 0.1, 0.2 of positions 2, 4, 7, 9; lookahead's are 0, 0, 1, 0."""
    lookahead = torch.zeros(1, 12)
    lookahead[0, 7] = 1000.0
    positions, counts = keep_mass(BUDGET, 0.55, LISTED, lookahead, SCORES.unsqueeze(0), LENGTH)
    assert positions[0, 0, : counts[0]].tolist() == [0, 7, 11]
    _, counts = keep_mass(BUDGET, 0.56, LISTED, lookahead, SCORES.unsqueeze(0), LENGTH)
    assert counts.tolist() == [4]


def test_all_groups_keep_as_many_as_the_one_that_needs_most() -> None:
    sharp = torch.zeros(1, 12)
    sharp[0, 9] = 1.0
    history = torch.stack([sharp, SCORES])
    positions, counts = keep_mass(BUDGET, 0.7, LISTED.expand(2, -1, -1), None, history, LENGTH)
    assert counts.tolist() == [4]
    # Of equal estimates the lower position stays.
    assert positions[:, 0, :4].tolist() == [[0, 2, 9, 11], [0, 2, 4, 11]]


def test_groups_without_history_are_judged_by_lookahead() -> None:
    """Lookahead prefers 7; so does its mean with history's shares, 0.3, 0.4, 0.1 and 0.2 of 2, 4, 7 and 9."""
    lookahead = torch.zeros(1, 12)
    lookahead[0, 7] = 1.0
    lists, history = LISTED.expand(2, -1, -1), SCORES.unsqueeze(0)
    positions, counts = keep_mass(BUDGET, 0.56, lists, lookahead, history, LENGTH)
    assert counts.tolist() == [4] and positions[:, 0, :4].tolist() == [[0, 4, 7, 11]] * 2, "a score of both"
    positions, counts = keep_mass(BUDGET, 0.56, lists, lookahead, history, LENGTH, history_groups=1)
    # The deep group needs 4, and so the shallow one keeps 4: of those without lookahead the lowest, not the best by
    # history.
    assert counts.tolist() == [4] and positions[:, 0, :4].tolist() == [[0, 2, 7, 11], [0, 4, 7, 11]]


@pytest.mark.parametrize("name", sorted(n for n, p in POLICIES.items() if p.uses_lookahead or p.uses_history))
@pytest.mark.parametrize("mass", [0.05, 0.5, 0.9])
def test_of_every_policys_list_the_protected_positions_and_the_floor_stay(name: str, mass: float) -> None:
    policy, lengths = POLICIES[name](), [100, 24, 25, 10]
    budget = policy.budget(24, 2, 6, 0.5)
    generator = torch.Generator().manual_seed(0)
    inside = torch.arange(100) < torch.tensor(lengths).unsqueeze(1)
    lookahead, history = torch.rand(2, 4, 100, generator=generator) ** 4 * inside
    context = Context(torch.zeros(8, 100, dtype=torch.int32), torch.arange(4), torch.tensor(lengths), 100)
    signals = (lookahead[None] if policy.uses_lookahead else None, history[None] if policy.uses_history else None)
    full = policy.select_groups(budget, *signals, context)
    positions, counts = keep_mass(budget, mass, full, *signals, context.seq_lens)
    assert positions.shape == full.shape and positions.dtype == torch.int32
    assert counts[1:].tolist()[::2] == [24, 10] and counts[0] >= least(budget) == 10
    for group in range(len(full)):
        for row, whole, n, count in zip(positions[group].tolist(), full[group].tolist(), lengths, counts.tolist()):
            listed = row[:count]
            assert row[count:] == [-1] * (24 - count) and listed == sorted(set(listed))
            assert set(listed) <= set(whole)
            if n <= 24:
                assert listed == list(range(n))
            else:
                assert {0, 1, *range(n - 6, n)} <= set(listed)
