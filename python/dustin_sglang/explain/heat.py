"""Scores as steps of heat."""

from __future__ import annotations

import torch

LEVELS = 10


def heat(scores: torch.Tensor) -> str:
    """A digit for each score of float32 ``[n]``: 0 below the mean, then one more for each doubling, up to 9."""
    mean = scores.mean().clamp(min=torch.finfo(scores.dtype).tiny)
    doublings = (scores / mean).clamp(min=0.5).log2().floor()
    return "".join(map(str, (doublings + 1).clamp(0, LEVELS - 1).int().tolist()))
