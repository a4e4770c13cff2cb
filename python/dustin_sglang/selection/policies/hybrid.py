"""Lookahead first, history for the rest: the paper's policy."""

from dustin_sglang.selection.policies.base import Budget, Policy


class Hybrid(Policy):
    """The paper's rule: m by the draft's lookahead, the rest by the target's history."""

    name = "hybrid"
    uses_lookahead = True
    uses_history = True
    mixes = True

    def budget(self, total: int, sinks: int, window: int, lookahead_share: float) -> Budget:
        return Budget(total, sinks, window, round(lookahead_share * (total - sinks - window)))
