"""A set of query heads, grouped by layer, in the order in which their queries are stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby


@dataclass(frozen=True)
class Heads:
    """Query heads of one model.

    Attributes
    ----------
    by_layer
        ``((layer, (head, ...)), ...)``, layers ascending. A head's index in the concatenation is its place in a query
        buffer ``[..., heads, head_dim]``.
    weights
        For each place, what the head counts for in the sum of scores; None: 1 each.
    """

    by_layer: tuple[tuple[int, tuple[int, ...]], ...]
    weights: tuple[float, ...] | None = None

    @classmethod
    def of(cls, each: Iterable[tuple[int, int, float]]) -> Heads:
        """Heads from layer, head and weight of each place; layers ascend."""
        places = list(each)
        layers = groupby(places, key=lambda place: place[0])
        weights = tuple(weight for *_, weight in places)
        return cls(
            tuple((layer, tuple(head for _, head, _ in own)) for layer, own in layers),
            None if all(weight == 1 for weight in weights) else weights,
        )

    @cached_property
    def each(self) -> tuple[tuple[int, int, float], ...]:
        """Layer, head and weight of each place."""
        places = [(layer, head) for layer, heads in self.by_layer for head in heads]
        weights = self.weights or (1.0,) * len(places)
        return tuple((layer, head, weight) for (layer, head), weight in zip(places, weights, strict=True))

    @cached_property
    def count(self) -> int:
        """Number of heads over all layers."""
        return sum(len(heads) for _, heads in self.by_layer)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The layers, in order."""
        return tuple(layer for layer, _ in self.by_layer)

    @cached_property
    def offsets(self) -> dict[int, tuple[int, int]]:
        """For each layer the half-open range of places that its heads take."""
        result, start = {}, 0
        for layer, heads in self.by_layer:
            result[layer] = (start, start + len(heads))
            start += len(heads)
        return result

    @cached_property
    def layer_index(self) -> tuple[int, ...]:
        """For each place, the index of its layer in `layers`."""
        return tuple(i for i, (_, heads) in enumerate(self.by_layer) for _ in heads)

    def places(self, parts: Sequence[Heads]) -> tuple[slice, ...]:
        """Places of consecutive parts, which together are these heads."""
        ends = list(accumulate((part.count for part in parts), initial=0))
        return tuple(slice(start, end) for start, end in zip(ends, ends[1:]))

    def kv_heads(self, num_heads: int, num_kv_heads: int) -> tuple[int, ...]:
        """For each place, the KV head that its query head reads (grouped-query attention)."""
        group = num_heads // num_kv_heads
        return tuple(head // group for _, heads in self.by_layer for head in heads)

    def shard(self, rank: int, size: int, num_heads: int) -> Heads:
        """The heads that tensor-parallel rank `rank` of `size` holds, in its own numbering."""
        per_rank = num_heads // size
        first = rank * per_rank
        return Heads.of(
            (layer, head - first, weight) for layer, head, weight in self.each if first <= head < first + per_rank
        )
