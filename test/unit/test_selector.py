"""What a selector does beside its policy: it warms up before the first request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dustin_sglang.selection.context import Context, score_width
from dustin_sglang.selection.policies import POLICIES
from dustin_sglang.selection.selector import Selector

BUDGET, SINKS, WINDOW, WIDTH = 12, 1, 2, 40


class RisingSignal:
    """Scores later positions higher; keeps what it was asked."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.asked: list[tuple[int, bool]] = []

    def score(self, context: Context, *, drafted: bool = True) -> torch.Tensor:
        self.asked.append((context.max_len, drafted))
        scores = torch.arange(context.max_len, dtype=torch.float32) + 1
        return (scores * (scores <= context.seq_lens[:, None])).expand(self.parts, -1, -1)


def make(policy: str) -> tuple[Selector, RisingSignal]:
    signal: Any = RisingSignal(1)
    chosen = POLICIES[policy]()
    return Selector(chosen, chosen.budget(BUDGET, SINKS, WINDOW, 0.5), signal, signal, signal), signal


@pytest.mark.parametrize("policy", [name for name, policy in POLICIES.items() if not policy.dense])
def test_warming_up_selects_and_leaves_no_trace(policy: str) -> None:
    table = torch.zeros(3, WIDTH, dtype=torch.int32)
    context = Context(table, torch.tensor([0, 2]), torch.tensor([30, 20]), 30)
    warm, signal = make(policy)
    warm.warm_up(table)
    assert {n for n, _ in signal.asked} <= {score_width(BUDGET + 1)}
    uses = warm.policy.uses_lookahead + warm.policy.uses_history
    assert [drafted for _, drafted in signal.asked].count(True) >= uses, "as after a draft"
    cold, _ = make(policy)
    assert torch.equal(warm.select(context, [30, 20]).positions, cold.select(context, [30, 20]).positions)


def test_a_gpu_is_warmed_up_for_contexts_of_every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    selector, _ = make("hybrid")
    asked: list[tuple[int, int]] = []

    def select(context: Context, seq_lens: list[int], *, drafted: bool) -> None:
        asked.append((*seq_lens, context.max_len))

    monkeypatch.setattr(selector, "select", select)
    selector.warm_up(torch.zeros(3, 100, dtype=torch.int32, device="meta"))
    assert asked == [(n, width) for n, width in ((13, 16), (17, 32), (33, 48), (65, 80)) for _ in range(2)]


class GivenSignal:
    """Scores whatever it was made with."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.scores = scores

    def score(self, context: Context, *, drafted: bool = True) -> torch.Tensor:
        return self.scores


@pytest.mark.parametrize("mass", [1.0, 0.5])
def test_history_of_one_deep_group_counts_for_that_group_alone(mass: float) -> None:
    """Of two groups one is deep and its history a single score; of four, two, which here have the same."""
    lookahead, history = torch.zeros(2, 1, 1, 48)
    lookahead[..., 10:18] = torch.arange(8.0, 0, -1)
    history[..., 14:30] = 1.0
    context = Context(torch.zeros(1, 64, dtype=torch.int32), torch.zeros(1, dtype=torch.int64), torch.tensor([40]), 48)
    found = []
    for groups in (2, 4):
        policy, back = POLICIES["hybrid-depth"](), GivenSignal(history.expand(groups // 2, -1, -1).contiguous())
        ahead: Any = GivenSignal(lookahead)
        selector = Selector(policy, policy.budget(20, 1, 1, 0.5), ahead, back, back, mass)  # type: ignore[arg-type]
        found.append(selector.select(context, [40], measured=True))
    two, four = found
    assert two.positions is not None and four.positions is not None
    assert torch.equal(two.positions[0], four.positions[0]) and torch.equal(two.positions[1], four.positions[3])
    assert (two.kept is None and four.kept is None) if mass == 1 else torch.equal(two.kept, four.kept)  # type: ignore
    assert two.measures is not None and four.measures is not None
    assert torch.equal(two.measures.history, four.measures.history)  # type: ignore[arg-type]


def test_no_list_is_warmed_up_where_no_context_exceeds_the_budget() -> None:
    selector, signal = make("hybrid")
    selector.warm_up(torch.zeros(3, BUDGET, dtype=torch.int32))
    assert not signal.asked
    selector, signal = make("dense")
    selector.warm_up(torch.zeros(3, WIDTH, dtype=torch.int32))
    assert not signal.asked
