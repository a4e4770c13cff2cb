"""How FlashInfer attends in a rectifying pass: planned from host numbers, one kernel a layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from sglang.kernels.ops.attention.utils import create_flashinfer_kv_indices_triton
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend, PrefillMetadata

from dustin_sglang.devices import to_device


class RewritingBackend(FlashInferAttnBackend):
    """SGLang's FlashInfer backend, except that a pass is planned without waiting for the device.

    SGLang plans a prefill from index pointers on the device, which FlashInfer copies back: the host would wait for the
    round before, and launch the pass only then. It also attends to a chunk and to what precedes it apart and merges
    both, three kernels a layer; a pass reads its own tokens from the pool too.
    """

    _rewriting: bool = False
    _plan_copied: torch.cuda.Event | None = None

    @contextlib.contextmanager
    def rewriting(self) -> Iterator[None]:
        """Within this, prefills are passes."""
        self._rewriting = True
        try:
            yield
        finally:
            self._rewriting = False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan a pass; other forwards as SGLang."""
        if not self._rewriting:
            super().init_forward_metadata(forward_batch)
            return
        (wrapper,) = self.prefill_wrappers_paged
        extends = torch.tensor(forward_batch.extend_seq_lens_cpu, dtype=torch.int32)
        lens = torch.tensor(forward_batch.extend_prefix_lens_cpu, dtype=torch.int32) + extends
        kv_indptr, bs = indptr(lens), len(lens)
        kv_indices = torch.empty(int(kv_indptr[-1]), dtype=torch.int32, device=forward_batch.seq_lens.device)
        updater = self.indices_updater_prefill
        create_flashinfer_kv_indices_triton[(bs,)](
            updater.req_to_token,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            to_device([kv_indptr.tolist()], kv_indices.device)[0].int(),
            None,
            kv_indices,
            updater.req_to_token.shape[1],
        )
        if self._plan_copied is not None:
            self._plan_copied.synchronize()  # a plan passes through the wrapper's one pinned buffer
        wrapper.begin_forward(
            indptr(extends),
            kv_indptr,
            kv_indices,
            torch.ones(bs, dtype=torch.int32),
            updater.num_qo_heads,
            updater.num_kv_heads,
            updater.head_dim,
            1,
            causal=True,
            q_data_type=updater.q_data_type,
            kv_data_type=updater.data_type,
            non_blocking=True,
            fixed_split_size=self.prefill_split_tile_size,
        )
        self._plan_copied = torch.cuda.Event()
        self._plan_copied.record()
        self.forward_metadata = PrefillMetadata(self.prefill_wrappers_paged, False, False)


def indptr(lens: torch.Tensor) -> torch.Tensor:
    """int32 ``[n + 1]``, where each of `n` lengths starts and where the last ends."""
    return torch.nn.functional.pad(torch.cumsum(lens, dim=0, dtype=torch.int32), (1, 0))
