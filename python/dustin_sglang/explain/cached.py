"""A model with the KV cache of one sequence, attended densely, whose scoring heads' queries can be seen."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dustin_sglang.calibrate.trace import Layer, TracedModel, attention_weights


@dataclass(frozen=True)
class Forward:
    """What one forward gives.

    Attributes
    ----------
    logits
        float32 ``[rows, vocab]``.
    queries
        Layer to its post-RoPE queries ``[rows, heads, head_dim]``, for the watched layers.
    attention
        float32 ``[length before the forward]``: attention of the rows to the positions before them, summed over rows,
        heads and the `attended` layers. Empty after a prefill.
    """

    logits: torch.Tensor
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    attention: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class CachedModel:
    """Dense inference of one sequence.

    Parameters
    ----------
    model
        The model.
    watched
        Layers whose queries a forward returns.
    capacity
        Most tokens of the sequence.
    attended
        Layers whose attention a forward returns the sum of; None for all.

    Attributes
    ----------
    length
        Tokens whose keys and values count; lower it to forget those behind.
    keys
        A pool a layer, ``[capacity, kv_heads, head_dim]``; slot j holds the sequence's token j.
    scale
        Factor of q.K; 0 before the prefill.
    """

    def __init__(
        self, model: TracedModel, watched: tuple[int, ...], capacity: int, attended: range | None = None
    ) -> None:
        self._model, self._watched, self._capacity = model, frozenset(watched), capacity
        self._attended = range(model.shape.layers) if attended is None else attended
        self.keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self.length, self.scale = 0, 0.0

    def prefill(self, ids: list[int]) -> Forward:
        """Read the sequence's first tokens; logits and queries are those of the last one."""
        queries: dict[int, torch.Tensor] = {}

        def visit(layer: Layer) -> None:
            self.scale = layer.scale
            for pools, part in ((self.keys, layer.k), (self._values, layer.v)):
                pool = part.new_zeros(self._capacity, part.shape[0], part.shape[2])
                pool[: len(ids)] = part.transpose(0, 1)
                pools.append(pool)
            if layer.index in self._watched:
                queries[layer.index] = layer.q[:, -1:].transpose(0, 1).clone()

        logits = self._model.read(ids, visit, [len(ids) - 1])
        self.length = len(ids)
        return Forward(logits, queries)

    def extend(self, ids: list[int]) -> Forward:
        """Append tokens; each attends to everything before it and to itself."""
        start, end = self.length, self.length + len(ids)
        queries: dict[int, torch.Tensor] = {}
        attention = torch.zeros(start, device=self.keys[0].device)

        def attend(layer: Layer) -> torch.Tensor:
            keys, values = self.keys[layer.index], self._values[layer.index]
            keys[start:end], values[start:end] = layer.k.transpose(0, 1), layer.v.transpose(0, 1)
            if layer.index in self._watched:
                queries[layer.index] = layer.q.transpose(0, 1).clone()
            weights = attention_weights(layer.q, keys[:end].transpose(0, 1), layer.scale, own_rows=True)
            if layer.index in self._attended:
                attention.add_(weights[:, :, :start].sum((0, 1)))
            grouped = weights.to(values.dtype).unflatten(0, (values.shape[1], -1))
            return (grouped @ values[:end].transpose(0, 1).unsqueeze(1)).flatten(0, 1)

        logits = self._model.verify(ids, list(range(start, end)), attend)
        self.length = end
        return Forward(logits, queries, attention)
