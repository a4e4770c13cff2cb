"""From queries to lists: scores with the signals that a policy uses, then lets it choose."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from dustin_sglang.selection.adaptive import keep_mass
from dustin_sglang.selection.context import Context, score_width
from dustin_sglang.selection.measures import Measures, measure
from dustin_sglang.selection.policies import Budget, Policy
from dustin_sglang.selection.signals import Signal


@dataclass(frozen=True)
class Selection:
    """What one verification reads.

    Attributes
    ----------
    positions
        int32 ``[groups, batch, budget]``, ascending, -1 beyond a request's count, which is the same in all groups of
        layers; None lists every position.
    counts
        Listed positions a request, known to the host; more than `positions` is wide where the whole context is read.
        Where lists end by mass, the most that there can be.
    kept
        Listed positions a request where lists end by mass, int64 ``[batch]`` on the device; None: `counts`.
    sparse
        Whether each request's list leaves something out.
    measures
        What the lists catch of the signals, where that was asked for.
    """

    positions: torch.Tensor | None
    counts: list[int]
    sparse: list[bool]
    measures: Measures | None = None
    kept: torch.Tensor | None = None

    def whole(self, rows: list[int], seq_lens: list[int]) -> Selection:
        """The same, but that the requests `rows` of the batch are read whole; `seq_lens` are its committed lengths."""
        counts, sparse = list(self.counts), list(self.sparse)
        for row in rows:
            counts[row], sparse[row] = seq_lens[row], False
        return replace(self, counts=counts, sparse=sparse)


class Selector:
    """Chooses the positions that the next verification reads.

    Parameters
    ----------
    policy, budget
        What to choose and how many.
    lookahead, history
        The two signals: a score for each group of layers, or one for all. History has those of the groups that the
        policy scores it for.
    pages
        History by page bounds, for the policies that are `Policy.paged`.
    mass
        Share of the estimated mass with which a list ends; 1 for lists of the whole budget.
    """

    def __init__(
        self,
        policy: Policy,
        budget: Budget,
        lookahead: Signal,
        history: Signal,
        pages: Signal,
        mass: float = 1.0,
    ) -> None:
        self.policy, self.budget, self.mass = policy, budget, mass
        self._lookahead, self._history, self._pages = lookahead, history, pages

    def is_sparse(self, seq_len: int) -> bool:
        """Whether a context of `seq_len` tokens is listed in part."""
        return not self.policy.dense and seq_len > self.budget.total

    def select(
        self, context: Context, seq_lens: list[int], *, drafted: bool = True, measured: bool = False
    ) -> Selection:
        """Score and choose for a batch.

        Parameters
        ----------
        context
            The batch on the device.
        seq_lens
            The same committed lengths on the host. Every decision is taken from these, so that all ranks agree and
            nothing is copied back from the device.
        drafted
            Whether the batch has been drafted in this round; a selection before that looks ahead with the kept queries.
        measured
            Whether to measure what the lists catch.
        """
        sparse = [self.is_sparse(n) for n in seq_lens]
        if not any(sparse):
            return Selection(None, list(seq_lens), sparse)
        lookahead, history = self.scores(context, drafted=drafted)
        positions = self.policy.select_groups(self.budget, lookahead, history, context)
        counts, kept = [min(n, self.budget.total) for n in seq_lens], None
        scored = lookahead, history, context.seq_lens, self.policy.history_groups(len(positions))
        if self.mass < 1:
            positions, kept = keep_mass(self.budget, self.mass, positions, *scored)
        measures = None
        if measured:
            measures = measure(self.budget, positions, *scored)
        return Selection(positions, counts, sparse, measures, kept)

    def warm_up(self, req_to_token: torch.Tensor) -> None:
        """Select for no request: else the first long ones, and their batches, wait for Triton to compile the kernels.

        Parameters
        ----------
        req_to_token
            int32 ``[slots, width]``, SGLang's table; its row 0 names slots of zeros.
        """
        if self.policy.dense or self.budget.total >= req_to_token.shape[1]:
            return
        slot = torch.zeros(1, dtype=torch.int64, device=req_to_token.device)
        for seq_len in warm_up_lengths(self.budget.total, req_to_token):
            context = Context(req_to_token, slot, slot + seq_len, score_width(seq_len))
            for drafted in (True, False):
                self.select(context, [seq_len], drafted=drafted)
        self.policy.prefilled(slot)

    def scores(self, context: Context, *, drafted: bool = True) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Lookahead and history, each float32 ``[groups, batch, context.max_len]``, or of one that all groups share.

        None where the policy does not use the signal.
        """
        policy = self.policy
        back = self._pages if policy.paged else self._history
        return (
            self._lookahead.score(context, drafted=drafted) if policy.uses_lookahead else None,
            back.score(context) if policy.uses_history else None,
        )


def warm_up_lengths(budget: int, req_to_token: torch.Tensor) -> list[int]:
    """Lengths of contexts, one for each kernel that is compiled: they depend on sizes that double with the context."""
    lengths = [budget + 1]
    if req_to_token.device.type != "cpu":  # nothing is compiled there
        width = req_to_token.shape[1]
        lengths += [2**n + 1 for n in range(budget.bit_length(), width.bit_length()) if 2**n < width]
    return lengths
