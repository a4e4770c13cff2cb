"""Verification by `dustin_kernels.attend_slots`: one launch a layer, nothing planned.

The kernel reads lengths and slots on the device. A captured graph therefore needs static buffers that are refilled
before each replay, lengths and the slots of each group of layers, and no host number of a request at all.
"""

from __future__ import annotations

from typing import Any

import torch

from dustin_sglang.slot_lists import SlotLists, attend_lists
from dustin_sglang.tap import ExtendTap
from dustin_sglang.verify_backend import ListedBackend


class AttendListedBackend(ListedBackend):
    """Verification by `attend_slots`; everything else as FlashInfer."""

    def __init__(self, model_runner: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, **kwargs)
        self._lists: list[SlotLists] = []  # of the verification to come, a group each

    def init_cuda_graph_state(
        self, max_bs: int, max_num_tokens: int, kv_indices_buf: torch.Tensor | None = None
    ) -> None:
        """Allocate the buffers that captured verifications read."""
        shape = (self._groups.count, max_bs * (self._list_width + self._g))
        self._graph_indices = torch.zeros(shape, dtype=torch.int32, device=self._device)
        self._graph_indptr = torch.zeros(max_bs + 1, dtype=torch.int32, device=self._device)
        cells = max_bs * self._g * self._g if self._is_tree else 0
        self._graph_mask = torch.ones(cells, dtype=torch.bool, device=self._device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Write the lists of a captured verification; other modes as FlashInfer."""
        if not forward_batch.forward_mode.is_target_verify():
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        bs = forward_batch.batch_size
        mask = self._graph_mask[: bs * self._g * self._g] if self._is_tree else None
        kv_indptr, room = self._graph_indptr[: bs + 1], self._list_width + self._g
        self._fill(forward_batch, self._counts(forward_batch, in_capture), kv_indptr, self._graph_indices, room, mask)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Write the lists of an eager verification; other modes as FlashInfer."""
        if not forward_batch.forward_mode.is_target_verify():
            super().init_forward_metadata(forward_batch)
            return
        bs, counts = forward_batch.batch_size, self._counts(forward_batch, in_capture=False)
        total = sum(counts) + bs * self._g
        kv_indptr = torch.empty(bs + 1, dtype=torch.int32, device=self._device)
        kv_indices = torch.empty((self._groups.count, total), dtype=torch.int32, device=self._device)
        mask = torch.empty(bs * self._g**2, dtype=torch.bool, device=self._device) if self._is_tree else None
        self._fill(forward_batch, counts, kv_indptr, kv_indices, max(counts) + self._g, mask)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """Attend: a verification over its lists, other modes as FlashInfer."""
        if not forward_batch.forward_mode.is_target_verify():
            out: torch.Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            return out
        if not self._lists:
            raise RuntimeError("a verification ran before its lists were written")
        lists = self._lists[self._groups.of(layer.layer_id)]
        return attend_lists(self, lists, self._g, q, k, v, layer, forward_batch, save_kv_cache)

    def _fill(
        self,
        forward_batch: Any,
        counts: list[int],
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        max_kv_len: int,
        mask: torch.Tensor | None,
    ) -> None:
        """Write the lists of a batch; lengths and mask are those of every group, `kv_indices` has a row a group."""
        self._write_lists(forward_batch, counts, kv_indptr, list(kv_indices))
        if mask is not None:
            mask.copy_(self._tree(forward_batch, len(counts)))
        self._lists = [SlotLists(kv_indptr, indices, max_kv_len, mask) for indices in kv_indices]


class DustinAttendBackend(ExtendTap, AttendListedBackend):
    """The target's backend for ``--dustin-attention dustin``."""
