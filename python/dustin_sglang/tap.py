"""Taps: attention backends that copy the queries of the scoring heads on their way to attention.

A tapped backend computes exactly what the backend beneath it computes. The copies go to the static buffers of a
`QueryStore`, so they can be recorded in a CUDA graph, where Python does not run at replay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from dustin_sglang.selection.state import QueryStore


class ExtendTap:
    """Mixin over an attention backend: keeps the confirmed row of every extend, records the rows of the rest.

    A prefill (chunk) keeps each request's last row at once, which also resets what an earlier life of the request
    slot left. A verification or draft extend records all rows as pending, since acceptance comes later.
    """

    store: QueryStore | None = None

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Record, then attend as the backend beneath."""
        if self.store is not None:
            record_extend(self.store, q, layer, forward_batch)
        return super().forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)  # type: ignore[misc]


class DecodeTap:
    """Mixin over the attention backend of one draft decode step: records its rows."""

    store: QueryStore | None = None
    step: int = 0

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Record, then attend as the backend beneath."""
        if self.store is not None:
            self.store.write_ahead(self.step, layer.layer_id, _heads(q, layer))
        return super().forward_decode(q, k, v, layer, forward_batch, *args, **kwargs)  # type: ignore[misc]


@contextlib.contextmanager
def silenced(*backends: Any) -> Iterator[None]:
    """Let the tapped `backends` record nothing while forwards run that are not replayed from a CUDA graph."""
    stores = [backend.store for backend in backends]
    for backend in backends:
        backend.store = None
    try:
        yield
    finally:
        for backend, store in zip(backends, stores, strict=True):
            backend.store = store


def record_extend(store: QueryStore, q: torch.Tensor, layer: Any, forward_batch: Any) -> None:
    """Record the queries of one layer of an extend-like forward in `store`."""
    mode = forward_batch.forward_mode
    if mode.is_target_verify() or mode.is_draft_extend_v2():
        store.write_pending(layer.layer_id, _heads(q, layer))
    elif layer.layer_id in store.heads.offsets:
        last_row = torch.cumsum(forward_batch.extend_seq_lens, dim=0) - 1
        store.keep(layer.layer_id, _heads(q, layer)[last_row], forward_batch.req_pool_indices)


def _heads(q: torch.Tensor, layer: Any) -> torch.Tensor:
    return q.view(-1, layer.tp_q_head_num, layer.head_dim)
