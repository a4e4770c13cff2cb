"""From queries to lists: scores with the signals that a policy uses, then lets it choose."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dustin_sglang.selection.context import Context
from dustin_sglang.selection.policies import Budget, Policy
from dustin_sglang.selection.signals import Signal


@dataclass(frozen=True)
class Selection:
    """What one verification reads.

    Attributes
    ----------
    positions
        int32 ``[batch, budget]``, ascending, -1 beyond a request's count; None lists every position.
    counts
        Listed positions a request, known to the host.
    sparse
        Whether each request's list leaves something out.
    """

    positions: torch.Tensor | None
    counts: list[int]
    sparse: list[bool]


class Selector:
    """Chooses the positions that the next verification reads.

    Parameters
    ----------
    policy, budget
        What to choose and how many.
    lookahead, history
        The two signals.
    pages
        History by page bounds, for the policies that are `Policy.paged`.
    """

    def __init__(self, policy: Policy, budget: Budget, lookahead: Signal, history: Signal, pages: Signal) -> None:
        self.policy, self.budget = policy, budget
        self._lookahead, self._history, self._pages = lookahead, history, pages

    def is_sparse(self, seq_len: int) -> bool:
        """Whether a context of `seq_len` tokens is listed in part."""
        return not self.policy.dense and seq_len > self.budget.total

    def select(self, context: Context, seq_lens: list[int]) -> Selection:
        """Score and choose for a batch.

        Parameters
        ----------
        context
            The batch on the device.
        seq_lens
            The same committed lengths on the host. Every decision is taken from these, so that all ranks agree and
            nothing is copied back from the device.
        """
        sparse = [self.is_sparse(n) for n in seq_lens]
        if not any(sparse):
            return Selection(None, list(seq_lens), sparse)
        policy = self.policy
        lookahead = self._lookahead.score(context) if policy.uses_lookahead else None
        back = self._pages if policy.paged else self._history
        history = back.score(context) if policy.uses_history else None
        positions = policy.select(self.budget, lookahead, history, context)
        return Selection(positions, [min(n, self.budget.total) for n in seq_lens], sparse)
