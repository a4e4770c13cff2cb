"""Both signals in one score."""

from functools import lru_cache

import torch

from dustin_sglang.selection.context import Context
from dustin_sglang.selection.policies.base import SUMMED, Budget, Policy


class HybridSum(Policy):
    """A weighed mean of lookahead and history, of which lookahead's weight is its share."""

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
        total = torch.lerp(history, lookahead, _column(budget.shares, lookahead.device))
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
