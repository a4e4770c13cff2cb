"""Both signals in one score."""

import torch

from dustin_sglang.selection.context import Context
from dustin_sglang.selection.policies.base import Budget, Policy


class HybridSum(Policy):
    """Lookahead and history, each normalised to sum 1, in one sum that the lookahead share weighs."""

    name = "hybrid-sum"
    uses_lookahead = True
    uses_history = True

    def budget(self, total: int, sinks: int, window: int, lookahead_share: float) -> Budget:
        return Budget(total, sinks, window, 0, rest="summed", lookahead_share=lookahead_share)

    def select(
        self, budget: Budget, lookahead: torch.Tensor | None, history: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        assert lookahead is not None and history is not None
        # Twice the share, so that equal shares multiply by exactly 1.
        ahead, back = 2 * budget.lookahead_share, 2 * (1 - budget.lookahead_share)
        return super().select(budget, None, ahead * _normalised(lookahead) + back * _normalised(history), context)


def _normalised(scores: torch.Tensor) -> torch.Tensor:
    total = scores.sum(1, keepdim=True)
    return scores / torch.where(total > 0, total, 1)
