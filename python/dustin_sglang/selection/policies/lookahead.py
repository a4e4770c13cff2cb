"""The draft's signal alone."""

from dustin_sglang.selection.policies.base import Budget, Policy


class Lookahead(Policy):
    """The draft's queries alone."""

    name = "lookahead"
    uses_lookahead = True
    mixes = True

    def budget(self, total: int, sinks: int, window: int, lookahead_share: float) -> Budget:
        return Budget(total, sinks, window, total - sinks - window)
