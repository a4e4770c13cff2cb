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


def test_no_list_is_warmed_up_where_no_context_exceeds_the_budget() -> None:
    selector, signal = make("hybrid")
    selector.warm_up(torch.zeros(3, BUDGET, dtype=torch.int32))
    assert not signal.asked
    selector, signal = make("dense")
    selector.warm_up(torch.zeros(3, WIDTH, dtype=torch.int32))
    assert not signal.asked
