"""Captured mass: the share of a dense verification's attention that a list of positions holds.

Only the positions that a policy can choose count: those between the sinks and the window. The unit is the share of what
the best single list of that size holds, so 1 is the one-list oracle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ListSize:
    """Size of a list: `budget` positions, of which the first `sinks` and the last `window` are always there."""

    budget: int
    sinks: int
    window: int

    @property
    def free(self) -> int:
        """Positions that a policy chooses."""
        return self.budget - self.sinks - self.window

    def middle(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores ``[..., context]`` of the positions that a policy can choose."""
        return scores[..., self.sinks : scores.shape[-1] - self.window]


def captured_mass(scores: torch.Tensor, oracle: torch.Tensor, size: ListSize) -> torch.Tensor:
    """Captured mass of the best positions by `scores`.

    Parameters
    ----------
    scores
        ``[..., context]``.
    oracle
        ``[context]``, attention of the dense verification summed over its rows, layers and heads.

    Returns
    -------
    torch.Tensor
        float32 ``[...]``, from 0 to 1.
    """
    middle = size.middle(oracle)
    best = middle.topk(size.free).values.sum()
    chosen = size.middle(scores).topk(size.free, sorted=False).indices
    return middle[chosen].sum(-1) / best


def listed_mass(positions: torch.Tensor, oracle: torch.Tensor, size: ListSize) -> float:
    """Captured mass of a list of positions int ``[budget]``, or of a list a layer by attention ``[layers, context]``.

    The unit is the best single list's in both cases, so that lists of several layers can capture more than 1.
    """
    chosen = (positions >= size.sinks) & (positions < oracle.shape[-1] - size.window)
    listed = oracle.gather(-1, positions.clamp(min=0).long()) * chosen
    best = size.middle(oracle if oracle.dim() == 1 else oracle.sum(0)).topk(size.free).values.sum()
    return float(listed.sum() / best)
