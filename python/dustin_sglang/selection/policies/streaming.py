"""Both ends of the context: a floor for the others."""

import torch

from dustin_sglang.selection.context import Context
from dustin_sglang.selection.policies.base import Budget, Policy


class Streaming(Policy):
    """Sinks and a recent window (StreamingLLM's set): nothing is scored."""

    name = "streaming"

    def budget(self, total: int, sinks: int, window: int, lookahead_share: float) -> Budget:
        return Budget(total, sinks, total - sinks, 0)

    def select(
        self, budget: Budget, lookahead: torch.Tensor | None, history: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        rank = torch.arange(budget.total, device=context.seq_lens.device).unsqueeze(0)
        length = context.seq_lens.unsqueeze(1)
        skipped = torch.where(rank < budget.sinks, 0, (length - budget.total).clamp(min=0))
        return torch.where(rank < length, rank + skipped, -1).to(torch.int32)
