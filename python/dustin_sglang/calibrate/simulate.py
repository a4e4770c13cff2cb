"""Sparse verification simulated: the target verifies over one list of positions in all layers.

The prefix keeps its dense keys and values, as at the first sparse verification after a prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dustin_sglang.calibrate.trace import Layer, TracedModel, attention_weights


@dataclass(frozen=True)
class Outcome:
    """How far a sparse verification is from the dense one, over its rows.

    Attributes
    ----------
    agreement
        Share of rows with the same best token.
    kl
        Mean KL(dense || sparse) in nats.
    """

    agreement: float
    kl: float


class Prefix:
    """Keys and values of a text in every layer of the target."""

    def __init__(self, target: TracedModel, ids: list[int]) -> None:
        self._target, self._ids = target, ids
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._dense: dict[tuple[int, int], torch.Tensor] = {}
        target.read(ids, self._keep, [0])

    def _keep(self, layer: Layer) -> None:
        self._keys.append(layer.k.clone())
        self._values.append(layer.v.clone())

    def keys(self, layer: int) -> torch.Tensor:
        """Post-RoPE keys ``[kv_heads, tokens, head_dim]``."""
        return self._keys[layer]

    def verify(self, n: int, rows: int, positions: torch.Tensor | None) -> torch.Tensor:
        """Logits float32 ``[rows, vocab]`` of the tokens n .. n + rows - 1 over a list of the first n positions.

        None lists all of them.
        """

        def attend(layer: Layer) -> torch.Tensor:
            listed = slice(0, n) if positions is None else positions.long()
            keys = torch.cat([self._keys[layer.index][:, listed], layer.k], dim=1)
            values = torch.cat([self._values[layer.index][:, listed], layer.v], dim=1)
            weights = attention_weights(layer.q, keys, layer.scale, own_rows=True).to(values.dtype)
            group = layer.q.shape[0] // values.shape[0]
            return (weights.unflatten(0, (-1, group)) @ values.unsqueeze(1)).flatten(0, 1)

        return self._target.verify(self._ids[n : n + rows], n, attend)

    def compare(self, n: int, rows: int, positions: torch.Tensor) -> Outcome:
        """The sparse verification over `positions` int ``[budget]`` beside the dense one."""
        if (n, rows) not in self._dense:
            self._dense[n, rows] = self.verify(n, rows, None).log_softmax(-1)
        dense, sparse = self._dense[n, rows], self.verify(n, rows, positions).log_softmax(-1)
        agreement = (dense.argmax(-1) == sparse.argmax(-1)).float().mean()
        return Outcome(float(agreement), float((dense.exp() * (dense - sparse)).sum(-1).mean()))
