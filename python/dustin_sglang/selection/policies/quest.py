"""Pages by bounds of their keys (Quest, arXiv 2406.10774), with one list for all layers."""

from dustin_sglang.selection.policies.base import Budget, Policy


class Quest(Policy):
    """Whole pages by the upper bound of their attention to the target's last query, until the budget is full.

    Every position has its page's score and ties go to the lower position, so pages are chosen whole; only the last one
    is cut off by the budget, and protected positions are taken out of theirs.
    """

    name = "quest"
    uses_history = True
    paged = True

    def budget(self, total: int, sinks: int, window: int, lookahead_share: float) -> Budget:
        return Budget(total, sinks, window, 0, rest="pages")
