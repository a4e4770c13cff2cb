"""Lists of KV slots in static buffers, and a layer's attention over them with `dustin_kernels.attend_slots`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dustin_kernels import attend_slots


@dataclass(frozen=True)
class SlotLists:
    """Packed lists of KV slots, as `dustin_kernels.attend_slots` takes them.

    Attributes
    ----------
    kv_indptr
        int32 ``[rows + 1]``.
    kv_indices
        int32, with room for rows of `max_kv_len` entries.
    max_kv_len
        The longest that a row can be.
    tree_mask
        Which of the last g entries sees which, bool ``[rows * g * g]``; None is causal.
    """

    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    max_kv_len: int
    tree_mask: torch.Tensor | None = None


def attend_lists(
    backend: Any,
    lists: SlotLists,
    rows: int,
    q: torch.Tensor,
    k: Any,
    v: Any,
    layer: Any,
    forward_batch: Any,
    save_kv_cache: bool,
) -> torch.Tensor:
    """Write a layer's new KV as the FlashInfer `backend` does, then attend to `lists`, `rows` query rows a list."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    pool = backend.token_to_kv_pool
    if k is not None and save_kv_cache:
        where = KVWriteLoc(forward_batch.out_cache_loc, None)
        pool.set_kv_buffer(layer, where, k, v, *backend._kv_write_scales(layer))
    keys, values = pool.get_kv_buffer(layer.layer_id)
    out = attend_slots(
        q.view(-1, layer.tp_q_head_num, layer.head_dim),
        keys,
        values,
        lists.kv_indptr,
        lists.kv_indices,
        rows,
        layer.scaling,
        max_kv_len=lists.max_kv_len,
        tree_mask=lists.tree_mask,
    )
    return out.view(-1, layer.tp_q_head_num * layer.head_dim)
