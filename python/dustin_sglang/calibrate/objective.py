"""What a choice of heads is judged by. Larger values are better."""

from __future__ import annotations

from typing import Protocol

import torch

from dustin_kernels import select_positions
from dustin_sglang.calibrate.mass import ListSize, captured_mass, listed_mass
from dustin_sglang.calibrate.simulate import Prefix
from dustin_sglang.calibrate.windows import Window


class Objective(Protocol):
    """Judges lists for a window, which is named by its number."""

    def of_scores(self, window: int, scores: torch.Tensor) -> torch.Tensor:
        """Values float32 ``[candidates]`` of the lists of the best positions by `scores` ``[candidates, context]``."""

    def of_list(self, window: int, positions: torch.Tensor) -> float:
        """Value of a list of positions int ``[budget]``."""


class Mass:
    """Captured mass: cheap, but it counts diffuse attention of early layers as much as a needle."""

    def __init__(self, windows: list[Window], size: ListSize) -> None:
        self._windows, self._size = windows, size

    def of_scores(self, window: int, scores: torch.Tensor) -> torch.Tensor:
        return captured_mass(scores, self._windows[window].oracle, self._size)

    def of_list(self, window: int, positions: torch.Tensor) -> float:
        return listed_mass(positions, self._windows[window].oracle, self._size)


class Divergence:
    """-KL(dense || sparse) of the simulated verification: what matters, at a forward pass of some rows a list.

    Parameters
    ----------
    places
        For each window, its text and its committed length.
    """

    def __init__(self, places: list[tuple[Prefix, int]], rows: int, size: ListSize) -> None:
        self._places, self._rows, self._size = places, rows, size

    def of_scores(self, window: int, scores: torch.Tensor) -> torch.Tensor:
        prefix, n = self._places[window]
        lists = torch.stack([best_positions(one, self._size) for one in scores])
        return torch.tensor([-outcome.kl for outcome in prefix.compare(n, self._rows, lists)])

    def of_list(self, window: int, positions: torch.Tensor) -> float:
        prefix, n = self._places[window]
        return -prefix.compare(n, self._rows, positions.unsqueeze(0))[0].kl


def best_positions(scores: torch.Tensor, size: ListSize) -> torch.Tensor:
    """The list int32 ``[budget]`` by one score ``[context]``."""
    return split_positions(None, scores, size, 0.0)


def split_positions(ahead: torch.Tensor | None, back: torch.Tensor, size: ListSize, share: float) -> torch.Tensor:
    """The list of the budget split: `share` of the free positions by `ahead`, the rest by `back`, ``[context]``."""
    return select_positions(
        None if ahead is None else ahead.unsqueeze(0),
        back.unsqueeze(0),
        torch.tensor([back.shape[0]]),
        budget=size.budget,
        sinks=size.sinks,
        window=size.window,
        num_lookahead=round(share * size.free),
    )[0]
