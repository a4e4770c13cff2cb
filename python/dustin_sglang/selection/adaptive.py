"""Lists that end where they hold enough of the estimated attention (``--dustin-mass``).

The estimate of a position is the mean of its shares of the signals that the policy uses. Protected positions count for
nothing in it: sinks alone would hold most of the mass, and they are listed anyway.
"""

from __future__ import annotations

import torch

from dustin_sglang.selection.policies import Budget

# Shares are summed as whole numbers of this unit: sums of floats may differ in the last bit from rank to rank.
_ONE = 1 << 40


def least(budget: Budget) -> int:
    """Positions that a list of a context beyond the budget never falls below.

    Protected ones and an eighth of the others: the estimate is that of the scoring heads, which may be sure of a few
    positions where other heads look elsewhere. At the defaults these are 123, about the smallest budget whose quality
    has been measured (128).
    """
    return budget.protected + (budget.total - budget.protected) // 8


def keep_mass(
    budget: Budget,
    mass: float,
    positions: torch.Tensor,
    lookahead: torch.Tensor | None,
    history: torch.Tensor | None,
    seq_lens: torch.Tensor,
    history_groups: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drop the positions of lists that the estimated mass does not need, those of least estimate first.

    A request keeps the smallest number, from `least` to the budget, with which the lists of all its groups hold `mass`;
    all where none does. A context within the budget is left whole. Nothing waits for the device.

    Parameters
    ----------
    mass
        Share of the estimated mass of unprotected positions, from 0 to 1.
    positions
        int32 ``[groups, batch, k]``, ascending, -1 beyond a list.
    lookahead, history
        float32 ``[scored, batch, max_len]`` of the `scored` deepest groups, or of one that all groups share; or None.
    seq_lens
        int64 ``[batch]``, committed lengths.
    history_groups
        How many of the deepest groups `history` is of, where one score alone does not say; None: all.

    Returns
    -------
    positions : torch.Tensor
        As the parameter.
    counts : torch.Tensor
        int64 ``[batch]``, listed positions a request, the same in all groups.
    """
    k, length = positions.shape[2], seq_lens.view(1, -1, 1)
    protected = (positions < budget.sinks) | (positions >= length - budget.window)
    estimate = _estimate(budget, positions, lookahead, history, seq_lens, history_groups)
    units = (estimate * _ONE).long().masked_fill(protected, 0)
    order = torch.where(protected, 2 * _ONE, units).sort(dim=-1, descending=True, stable=True).indices
    held = units.gather(-1, order).cumsum(-1)
    needed = 1 + (held < round(mass * _ONE)).sum(-1)
    counts = needed.amax(0).clamp(min=least(budget), max=k)
    counts = torch.where(seq_lens > budget.total, counts, seq_lens)

    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(k, device=order.device).expand_as(order))
    kept = ((rank < counts.view(1, -1, 1)) | (length <= budget.total)) & (positions >= 0)
    end = torch.iinfo(positions.dtype).max
    closed_up = torch.where(kept, positions, end).sort(dim=-1).values
    return closed_up.masked_fill(closed_up == end, -1), counts


def _estimate(
    budget: Budget,
    positions: torch.Tensor,
    lookahead: torch.Tensor | None,
    history: torch.Tensor | None,
    seq_lens: torch.Tensor,
    history_groups: int | None,
) -> torch.Tensor:
    """Shares float32 ``[groups, batch, k]`` of listed positions in the mass of all unprotected ones."""
    shares = torch.zeros(positions.shape, device=positions.device)
    signals = torch.zeros(positions.shape[0], 1, 1, device=positions.device)
    for scores, of_one in ((lookahead, len(shares)), (history, history_groups or len(shares))):
        if scores is None:
            continue
        groups = of_one if len(scores) == 1 else len(scores)
        column, length = torch.arange(scores.shape[-1], device=scores.device), seq_lens.unsqueeze(1)
        free = (column >= budget.sinks) & (column < length - budget.window)
        total = (scores * free).sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
        listed = positions[-groups:].clamp(min=0).long()
        shares[-groups:] += scores.expand(groups, -1, -1).gather(2, listed) / total
        signals[-groups:] += 1
    return shares / signals
