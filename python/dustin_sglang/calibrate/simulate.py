"""Sparse verification simulated: the target verifies over one list of positions in all layers.

The prefix keeps its dense keys and values, as at the first sparse verification after a prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from dustin_sglang.calibrate.trace import Layer, TracedModel, attention_weights

_AT_ONCE = 16  # lists of one forward, which reads the weights once for all of them


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
    """Keys and values of a text in every layer of the target.

    Parameters
    ----------
    target, ids
        The model and the text; reading it costs one prefill.
    see
        Is shown every layer of this prefill too.
    """

    def __init__(self, target: TracedModel, ids: list[int], see: Callable[[Layer], None] = lambda layer: None) -> None:
        self._target, self._ids, self._see = target, ids, see
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._dense: dict[tuple[int, int], torch.Tensor] = {}
        target.read(ids, self._keep, [0])

    def _keep(self, layer: Layer) -> None:
        self._keys.append(layer.k.clone())
        self._values.append(layer.v.clone())
        self._see(layer)

    def verify(self, n: int, rows: int, lists: torch.Tensor) -> torch.Tensor:
        """Verify the tokens n .. n + rows - 1 over several lists of the first n positions, in one forward.

        Parameters
        ----------
        lists
            int ``[lists, budget]``, or ``[layers, lists, budget]`` where each layer reads lists of its own.

        Returns
        -------
        torch.Tensor
            Logits float32 ``[lists, rows, vocab]``.
        """
        count = lists.shape[-2]
        lists = lists.long().to(self._keys[0].device)

        def attend(layer: Layer) -> torch.Tensor:
            # Each list is a sequence of its own: (KV head, list) takes the place of the KV head.
            kv_heads, group = layer.k.shape[0], layer.q.shape[0] // layer.k.shape[0]
            own = lists[layer.index] if lists.dim() == 3 else lists
            split = (kv_heads, group, count, rows, -1)
            q = layer.q.reshape(split).transpose(1, 2).flatten(0, 2)
            keys = self._with_own(self._keys[layer.index], layer.k, own)
            values = self._with_own(self._values[layer.index], layer.v, own)
            weights = attention_weights(q, keys, layer.scale, own_rows=True).to(values.dtype)
            out = weights.unflatten(0, (-1, group)) @ values.unsqueeze(1)
            return out.unflatten(0, (kv_heads, count)).transpose(1, 2).reshape(layer.q.shape)

        ids, positions = self._ids[n : n + rows] * count, list(range(n, n + rows)) * count
        return self._target.verify(ids, positions, attend).unflatten(0, (count, rows))

    @staticmethod
    def _with_own(prefix: torch.Tensor, own: torch.Tensor, lists: torch.Tensor) -> torch.Tensor:
        """Keys or values ``[kv_heads * lists, budget + rows, head_dim]``: the listed ones, then the rows' own."""
        own = own.unflatten(1, (lists.shape[0], -1))
        return torch.cat([prefix[:, lists], own], dim=2).flatten(0, 1)

    def compare(self, n: int, rows: int, lists: torch.Tensor) -> list[Outcome]:
        """Sparse verifications over `lists`, as `verify` takes them, each beside the dense one."""
        if (n, rows) not in self._dense:
            self._dense[n, rows] = self.verify(n, rows, torch.arange(n).unsqueeze(0))[0].log_softmax(-1)
        dense, outcomes = self._dense[n, rows], []
        for some in lists.split(_AT_ONCE, dim=-2):
            for sparse in self.verify(n, rows, some).log_softmax(-1):
                agreement = (dense.argmax(-1) == sparse.argmax(-1)).float().mean()
                outcomes.append(Outcome(float(agreement), float((dense.exp() * (dense - sparse)).sum(-1).mean())))
        return outcomes
