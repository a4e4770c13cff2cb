"""What a choice of heads is judged by. Larger values are better."""

from __future__ import annotations

from typing import Protocol

import torch

from dustin_kernels import select_positions
from dustin_sglang.calibrate.mass import ListSize, captured_mass, listed_mass
from dustin_sglang.calibrate.simulate import Prefix
from dustin_sglang.calibrate.windows import Window
from dustin_sglang.selection.layer_groups import LayerGroups


class Objective(Protocol):
    """Judges lists for a window, which is named by its number."""

    def of_scores(self, window: int, scores: torch.Tensor) -> torch.Tensor:
        """Values float32 ``[candidates]`` of the lists of the best positions by `scores` ``[candidates, context]``."""

    def of_list(self, window: int, positions: torch.Tensor) -> float:
        """Value of a list of positions int ``[budget]``."""


class Mass:
    """Captured mass: cheap, but it counts diffuse attention of early layers as much as a needle.

    Parameters
    ----------
    layers
        Those whose attention counts; None for all.
    """

    def __init__(self, windows: list[Window], size: ListSize, layers: range | None = None) -> None:
        every = slice(None) if layers is None else slice(layers.start, layers.stop)
        self._oracles = [window.attention[every].sum(0) for window in windows]
        self._size = size

    def of_scores(self, window: int, scores: torch.Tensor) -> torch.Tensor:
        return captured_mass(scores, self._oracles[window], self._size)

    def of_list(self, window: int, positions: torch.Tensor) -> float:
        return listed_mass(positions, self._oracles[window], self._size)


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

    def of_group(self, windows: list[Window], groups: LayerGroups, group: int) -> GroupDivergence:
        """The same for one group of layers; `windows` are those at the places."""
        return GroupDivergence(self._places, windows, self._rows, self._size, groups, group)

    def of_list(self, window: int, positions: torch.Tensor) -> float:
        prefix, n = self._places[window]
        return -prefix.compare(n, self._rows, positions.unsqueeze(0))[0].kl


class GroupDivergence(Divergence):
    """The same for one group of layers, while the other groups read their own best lists, which no policy knows.

    So groups do not depend on each other, and the other groups add little of their own.

    Parameters
    ----------
    windows
        Those at `places`.
    groups, group
        All groups, and the one whose lists are judged.
    """

    def __init__(
        self,
        places: list[tuple[Prefix, int]],
        windows: list[Window],
        rows: int,
        size: ListSize,
        groups: LayerGroups,
        group: int,
    ) -> None:
        super().__init__(places, rows, size)
        self._windows, self._groups, self._group = windows, groups, group

    def of_scores(self, window: int, scores: torch.Tensor) -> torch.Tensor:
        return self._judge(window, torch.stack([best_positions(one, self._size) for one in scores]))

    def of_list(self, window: int, positions: torch.Tensor) -> float:
        return float(self._judge(window, positions.unsqueeze(0))[0])

    def _judge(self, window: int, lists: torch.Tensor) -> torch.Tensor:
        attention = self._windows[window].attention
        by_layer = torch.empty((self._groups.layers, *lists.shape), dtype=lists.dtype)
        for group, layers in enumerate(self._groups.ranges):
            best = best_positions(attention[layers.start : layers.stop].sum(0), self._size)
            by_layer[layers.start : layers.stop] = lists if group == self._group else best
        prefix, n = self._places[window]
        return torch.tensor([-outcome.kl for outcome in prefix.compare(n, self._rows, by_layer)])


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
