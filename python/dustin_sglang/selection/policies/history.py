"""The target's signal alone."""

from dustin_sglang.selection.policies.base import Policy


class History(Policy):
    """The target's last query alone."""

    name = "history"
    uses_history = True
