"""What a list catches of the signals that chose it: computed for monitored verifications only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch

from dustin_kernels import select_positions
from dustin_sglang.selection.policies import Budget


@dataclass(frozen=True)
class Measures:
    """Shares from 0 to 1, float32 ``[batch]``, means over groups; None where the policy does not use the signals.

    Attributes
    ----------
    lookahead, history
        Share of the signal's softmax mass, over the whole context, that lies on listed positions: of the scoring heads'
        attention, not of the model's. Each group's list counts, for history beside the group's own signal and only if
        the policy scores it.
    overlap
        Share that the two signals' best positions have in common, each choosing lookahead's part of the budget alone.
    """

    lookahead: torch.Tensor | None
    history: torch.Tensor | None
    overlap: torch.Tensor | None

    def present(self) -> dict[str, torch.Tensor]:
        """Those that there are, by name."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


def measure(
    budget: Budget,
    positions: torch.Tensor,
    lookahead: torch.Tensor | None,
    history: torch.Tensor | None,
    seq_lens: torch.Tensor,
    history_groups: int | None = None,
) -> Measures:
    """Measure the lists of a batch against the scores that made them.

    Parameters
    ----------
    positions
        int32 ``[groups, batch, k]``.
    lookahead, history
        float32 ``[scored, batch, max_len]``, of the `scored` deepest groups, or of one that all groups share; None
        where the policy does not use the signal.
    history_groups
        How many of the deepest groups `history` is of, where one score alone does not say; None: all.
    """
    lists = (lookahead, positions), (history, positions[-(history_groups or len(positions)) :])
    ahead, back = ([] if s is None else [captured_mass(*pair) for pair in _pairs(s, own)] for s, own in lists)
    both = []
    if lookahead is not None and history is not None:
        both = [overlap(budget, *pair, seq_lens) for pair in _pairs(lookahead, history)]
    return Measures(*(torch.stack(shares).mean(0) if shares else None for shares in (ahead, back, both)))


def _pairs(first: torch.Tensor, second: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both by group, the deepest ones where one has more; a single score is that of all groups."""
    count = min((len(x) for x in (first, second) if len(x) > 1), default=1)
    both = (x.expand(count, -1, -1) if len(x) == 1 else x[-count:] for x in (first, second))
    return zip(*both, strict=True)


def captured_mass(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Share of the scores on listed positions; entries of -1 list nothing."""
    listed = scores.gather(1, positions.clamp(min=0).long()).masked_fill(positions < 0, 0.0)
    return listed.sum(1) / scores.sum(1).clamp(min=torch.finfo(scores.dtype).tiny)


def overlap(budget: Budget, lookahead: torch.Tensor, history: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Share of the m unprotected positions best by lookahead that are also among the m best by history.

    Meaningless for a context of at most k tokens, and 0 where the budget gives lookahead nothing.
    """
    m = budget.by_source.get("lookahead", 0)
    if m == 0:
        return torch.zeros(len(seq_lens), device=seq_lens.device)

    def best(by_lookahead: torch.Tensor | None, by_history: torch.Tensor | None) -> torch.Tensor:
        return select_positions(
            by_lookahead,
            by_history,
            seq_lens,
            budget=budget.protected + m,
            sinks=budget.sinks,
            window=budget.window,
            num_lookahead=0 if by_lookahead is None else m,
        )

    end = lookahead.shape[1]  # -1, an empty entry, marks one column behind the context
    marked = torch.zeros((len(seq_lens), end + 1), dtype=torch.bool, device=seq_lens.device)
    first, second = (
        torch.where(listed < 0, end, listed).long() for listed in (best(lookahead, None), best(None, history))
    )
    marked.scatter_(1, first, True)
    return (marked.gather(1, second).sum(1) - budget.protected).float() / max(m, 1)
