"""No selection."""

from dustin_sglang.selection.policies.base import Policy


class Dense(Policy):
    """Every position: what SGLang's own verification reads, on our code path."""

    name = "dense"
    dense = True
