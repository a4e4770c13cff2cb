"""Which signal chooses depends on the depth: another reading of the paper."""

from dataclasses import replace

import torch

from dustin_sglang.selection.context import Context
from dustin_sglang.selection.policies.base import Budget, Policy


class HybridDepth(Policy):
    """The shallow half of the groups of layers lists by lookahead alone, the deep half by its own histories alone.

    All shallow groups read one list, since they share the lookahead. The budget of a launch is divided on the average
    over groups.
    """

    name = "hybrid-depth"
    uses_lookahead = True
    uses_history = True

    @classmethod
    def why_not_groups(cls, count: int, mixed: bool = False) -> str | None:
        return "it has as many shallow groups as deep ones; use an even number, such as 2" if count % 2 else None

    def history_groups(self, count: int) -> int:
        return count // 2

    def budget(self, total: int, sinks: int, window: int, lookahead_share: float) -> Budget:
        return Budget(total, sinks, window, (total - sinks - window) // 2)

    def select_groups(
        self, budget: Budget, lookahead: torch.Tensor | None, history: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        free = budget.total - budget.protected
        shallow = super().select_groups(replace(budget, lookahead=free), lookahead, None, context)
        deep = super().select_groups(replace(budget, lookahead=0), None, history, context)
        return torch.cat([shallow.expand_as(deep), deep])
