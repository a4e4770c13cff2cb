"""Both signals in one score."""

from functools import lru_cache

import torch

from dustin_sglang.selection.context import Context
from dustin_sglang.selection.policies.base import SUMMED, Budget, Policy


class HybridSum(Policy):
    """Lookahead and history, each normalised to sum 1, in one sum that the lookahead share weighs."""

    name = "hybrid-sum"
    uses_lookahead = True
    uses_history = True
    mixes = True

    def budget(self, total: int, sinks: int, window: int, lookahead_share: float) -> Budget:
        return Budget(total, sinks, window, 0, rest=SUMMED, shares=(lookahead_share,))

    def select_groups(
        self, budget: Budget, lookahead: torch.Tensor | None, history: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        assert lookahead is not None and history is not None
        shares = _column(budget.shares, lookahead.device)
        # Twice the share, so that equal shares multiply by exactly 1.
        total = 2 * shares * _normalised(lookahead) + 2 * (1 - shares) * _normalised(history)
        return super().select_groups(budget, None, total, context)

    def select(
        self, budget: Budget, lookahead: torch.Tensor | None, history: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        if lookahead is None:  # called by way of `select_groups`, which has summed
            return super().select(budget, None, history, context)
        assert history is not None
        return self.select_groups(budget, lookahead.unsqueeze(0), history.unsqueeze(0), context)[0]


@lru_cache(maxsize=16)
def _column(shares: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Shares float32 ``[groups or 1, 1, 1]``; made once, since each time would copy them to the device."""
    return torch.tensor(shares, device=device).view(-1, 1, 1)


def _normalised(scores: torch.Tensor) -> torch.Tensor:
    total = scores.sum(-1, keepdim=True)
    return scores / torch.where(total > 0, total, 1)
