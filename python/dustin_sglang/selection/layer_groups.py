"""Contiguous groups of target layers, each of which reads a list of its own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from dustin_sglang.selection.heads import Heads


@dataclass(frozen=True)
class LayerGroups:
    """`count` contiguous groups of `layers` layers, of sizes that differ by one at most.

    Raises
    ------
    ValueError
        There are fewer layers than groups.
    """

    layers: int
    count: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.count <= self.layers:
            raise ValueError(f"{self.layers} layers cannot fall into {self.count} groups")

    @cached_property
    def ranges(self) -> tuple[range, ...]:
        """Layers of each group, the shallowest first."""
        starts = [group * self.layers // self.count for group in range(self.count + 1)]
        return tuple(range(first, end) for first, end in zip(starts, starts[1:]))

    def of(self, layer: int) -> int:
        """The group of a layer."""
        return next(group for group, layers in enumerate(self.ranges) if layer in layers)

    def split(self, heads: Heads) -> tuple[Heads, ...]:
        """The heads of each group's layers; none where a group has none of them."""
        return tuple(Heads.of(place for place in heads.each if place[0] in layers) for layers in self.ranges)
