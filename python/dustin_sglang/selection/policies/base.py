"""What a selection policy is: it turns scores into ascending lists of positions, one a request and group of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dustin_kernels import select_positions
from dustin_sglang.selection.context import Context


@dataclass(frozen=True)
class Budget:
    """How the k positions of a list are divided.

    Attributes
    ----------
    total
        k, positions listed for a request whose context is longer than k.
    sinks, window
        Protected first and last positions.
    lookahead
        m, positions chosen by lookahead.
    rest
        What fills the others; ``"history"`` unless a policy says otherwise.
    lookahead_share
        What lookahead counts for in a sum of both signals, from 0 to 1; history counts for what is left.
    """

    total: int
    sinks: int
    window: int
    lookahead: int
    rest: str = "history"
    lookahead_share: float = 0.5

    @property
    def protected(self) -> int:
        """Positions that every list of k holds whatever their scores."""
        return self.sinks + self.window

    @property
    def left(self) -> int:
        """Positions that `rest` fills."""
        return self.total - self.protected - self.lookahead


class Policy:
    """One way to choose. Subclasses set the class attributes and override what differs; a launch makes one instance.

    Attributes
    ----------
    name
        Value of ``--dustin-policy``.
    uses_lookahead, uses_history
        Signals that must be scored for this policy; the others are not computed.
    paged
        History is scored by page bounds (`signals.PageBounds`) instead of by attention.
    dense
        Every position is listed whatever the budget.
    """

    name: ClassVar[str]
    uses_lookahead: ClassVar[bool] = False
    uses_history: ClassVar[bool] = False
    paged: ClassVar[bool] = False
    dense: ClassVar[bool] = False

    @classmethod
    def why_not_groups(cls, count: int) -> str | None:
        """What speaks against `count` groups of layers with lists of their own, and what to do instead; or None."""
        if count > 1 and not cls.uses_history:
            return "lists of groups differ by history, which this policy does not score; use 1"
        return None

    def history_groups(self, count: int) -> int:
        """How many of `count` groups have history scored: the deepest ones."""
        return count

    def budget(self, total: int, sinks: int, window: int, lookahead_share: float) -> Budget:
        """Divide `total` positions; `lookahead_share` is lookahead's share of the unprotected ones, or of a sum."""
        return Budget(total, sinks, window, 0)

    def prefilled(self, slots: torch.Tensor) -> None:
        """Forget the requests at the slots int64 ``[batch]``: they were prefilled, or a part of them was."""

    def select_groups(
        self, budget: Budget, lookahead: torch.Tensor | None, history: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        """List the positions of every group of layers; all of them are chosen in one launch.

        Parameters
        ----------
        lookahead
            float32 ``[batch, context.max_len]``, which all groups share; None when the policy does not use it.
        history
            float32 ``[groups, batch, context.max_len]``, of those groups that `history_groups` asks for, or None.

        Returns
        -------
        torch.Tensor
            int32 ``[groups, batch, budget.total]``, as `select` lists each.
        """
        groups = 1 if history is None else history.shape[0]
        if lookahead is not None and groups > 1:
            lookahead = lookahead.repeat(groups, 1)
        flat = None if history is None else history.flatten(0, 1)
        return self.select(budget, lookahead, flat, context.repeated(groups)).unflatten(0, (groups, -1))

    def select(
        self, budget: Budget, lookahead: torch.Tensor | None, history: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        """List the positions that layers with one list read.

        Parameters
        ----------
        budget
            From `Policy.budget`.
        lookahead, history
            float32 ``[batch, context.max_len]``, or None when the policy does not use the signal.
        context
            The batch.

        Returns
        -------
        torch.Tensor
            int32 ``[batch, budget.total]``: ascending unique positions, all of them when the context is not longer
            than the budget; -1 beyond.
        """
        return select_positions(
            lookahead,
            history,
            context.seq_lens,
            budget=budget.total,
            sinks=budget.sinks,
            window=budget.window,
            num_lookahead=budget.lookahead,
        )
