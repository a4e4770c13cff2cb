"""What a selection policy is: it turns scores into ascending lists of positions, one a request and group of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from dustin_kernels import select_positions
from dustin_sglang.selection.context import Context

SUMMED = "summed"  # `Budget.rest` where both signals choose together


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
    shares
        What lookahead counts for in a sum of both signals, from 0 to 1, in each group of layers, or one number for all;
        history counts for what is left.
    """

    total: int
    sinks: int
    window: int
    lookahead: int
    rest: str = "history"
    shares: tuple[float, ...] = (0.5,)

    @property
    def protected(self) -> int:
        """Positions that every list of k holds whatever their scores."""
        return self.sinks + self.window

    @property
    def left(self) -> int:
        """Positions that `rest` fills."""
        return self.total - self.protected - self.lookahead

    @property
    def by_source(self) -> dict[str, int]:
        """Positions of a list by what chose them; where signals are summed, by what each counts for in the sum."""
        if self.rest != SUMMED:
            return {"protected": self.protected, "lookahead": self.lookahead, self.rest: self.left}
        ahead = round(self.left * sum(self.shares) / len(self.shares))
        return {"protected": self.protected, "lookahead": ahead, "history": self.left - ahead}


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
    mixes
        Groups of layers may differ by what each makes of lookahead (`profile.GroupWeights`).
    """

    name: ClassVar[str]
    uses_lookahead: ClassVar[bool] = False
    uses_history: ClassVar[bool] = False
    paged: ClassVar[bool] = False
    dense: ClassVar[bool] = False
    mixes: ClassVar[bool] = False

    @classmethod
    def why_not_groups(cls, count: int, mixed: bool = False) -> str | None:
        """What speaks against `count` groups of layers with lists of their own, and what to do instead; or None.

        Parameters
        ----------
        mixed
            The profile says what each of so many groups makes of lookahead.
        """
        if count > 1 and not (cls.uses_history or (mixed and cls.mixes)):
            return "lists of groups differ by history, which this policy does not score; use 1"
        return None

    def history_groups(self, count: int) -> int:
        """How many of `count` groups have history scored: the deepest ones."""
        return count

    def budget(self, total: int, sinks: int, window: int, lookahead_share: float) -> Budget:
        """Divide `total` positions; `lookahead_share` is lookahead's share of the unprotected ones, or of a sum.

        Shares of a sum that differ between groups of layers are set in what this returns (`Budget.shares`).
        """
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
            float32 ``[groups, batch, context.max_len]``, or ``[1, ...]`` where all groups share it; None when the
            policy does not use it.
        history
            Likewise, of those groups that `history_groups` asks for.

        Returns
        -------
        torch.Tensor
            int32 ``[groups, batch, budget.total]``, as `select` lists each.
        """
        groups = max((len(scores) for scores in (lookahead, history) if scores is not None), default=1)

        def flat(scores: torch.Tensor | None) -> torch.Tensor | None:
            return None if scores is None else scores.expand(groups, -1, -1).flatten(0, 1)

        lists = self.select(budget, flat(lookahead), flat(history), context.repeated(groups))
        return lists.unflatten(0, (groups, -1))

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
