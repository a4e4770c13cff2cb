"""The draft's GPU backends: SGLang's FlashInfer, tapped, and attention over lists where drafting is sparse.

Sparse layers take `attend_slots`, which reads lengths on the device: nothing is planned for them, and FlashInfer is
planned, as SGLang does it, for layers that stay dense alone. A captured graph makes the decode steps' lists itself.
The draft extend's are written before its graph starts: from then on SGLang lets the scheduler change `req_to_token`.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend, FlashInferMultiStepDraftBackend
from sglang.srt.speculative.draft_utils import DraftBackendFactory

from dustin_sglang.rewriting import RewritingBackend
from dustin_sglang.slot_lists import SlotLists, attend_lists
from dustin_sglang.sparse_draft import SparseDraft
from dustin_sglang.tap import DecodeTap, ExtendTap


class SparseFlashInferBackend(FlashInferAttnBackend):
    """FlashInfer, some of whose layers read lists in the draft's decode steps and draft extends.

    Attributes
    ----------
    sparse
        The lists by request slot; None where drafting is dense.
    listed
        Lists of the decode steps or draft extends to come, or of those being captured.
    """

    sparse: SparseDraft | None = None
    listed: SlotLists | None = None

    def is_listed(self, layer: Any) -> bool:
        """Whether a layer reads the list rather than everything."""
        return self.sparse is not None and layer.layer_id not in self.sparse.dense_layers

    def attend_listed(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, rows: int, save_kv_cache: bool
    ) -> torch.Tensor:
        """Attend to the lists, `rows` query rows a list."""
        if self.listed is None:
            raise RuntimeError("a sparse draft forward ran before its lists were made")
        return attend_lists(self, self.listed, rows, q, k, v, layer, forward_batch, save_kv_cache)


class DraftExtendBackend(RewritingBackend, SparseFlashInferBackend):
    """The draft's prefill, which is always dense, and its draft extends."""

    num_draft_tokens: int

    @property
    def needs_cpu_seq_lens(self) -> bool:
        """Whether SGLang must know committed lengths on the host before a round: FlashInfer plans from them."""
        return self.sparse is None or bool(self.sparse.dense_layers)

    def __init__(self, model_runner: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, **kwargs)
        self.num_draft_tokens = model_runner.server_args.speculative_num_draft_tokens
        self._captured: dict[int, SlotLists] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare an eager forward."""
        if self._reads_lists(forward_batch):
            self.listed = self._list(forward_batch)
        if self._needs_flashinfer(forward_batch):
            super().init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare the capture of a draft extend, or refill the buffers that the captured one reads."""
        bs = forward_batch.batch_size
        if self._reads_lists(forward_batch):
            if in_capture:
                self.listed = self._captured[bs] = self._list(forward_batch)
            else:
                self._list(forward_batch, into=self._captured[bs])
        if self._needs_flashinfer(forward_batch):
            super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """Attend: draft extends over the lists in sparse layers, everything else as FlashInfer does."""
        if forward_batch.forward_mode.is_draft_extend_v2() and self.is_listed(layer):
            return self.attend_listed(q, k, v, layer, forward_batch, self.num_draft_tokens, save_kv_cache)
        out: torch.Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return out

    def _reads_lists(self, forward_batch: Any) -> bool:
        return self.sparse is not None and bool(forward_batch.forward_mode.is_draft_extend_v2())

    def _needs_flashinfer(self, forward_batch: Any) -> bool:
        return self.needs_cpu_seq_lens or not self._reads_lists(forward_batch)

    def _list(self, forward_batch: Any, into: SlotLists | None = None) -> SlotLists:
        """Lists of a draft extend, which end with its own tokens."""
        assert self.sparse is not None
        bs = forward_batch.batch_size
        return self.sparse.lists(forward_batch.req_pool_indices[:bs], forward_batch.seq_lens[:bs], into=into)[0]


class TappedFlashInferBackend(ExtendTap, DraftExtendBackend):
    """The draft's prefill and draft-extend attention."""


class DraftStepBackend(SparseFlashInferBackend):
    """One draft decode step."""

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """Attend over the lists in sparse layers, as FlashInfer does in the others."""
        if self.is_listed(layer):
            return self.attend_listed(q, k, v, layer, forward_batch, 1, save_kv_cache)
        out: torch.Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return out


class TappedFlashInferStep(DecodeTap, DraftStepBackend):
    """The attention of one draft decode step."""


class TappedMultiStepBackend(FlashInferMultiStepDraftBackend):
    """The draft's decode attention: one tapped backend a decode forward; SGLang runs one fewer than steps."""

    sparse: SparseDraft | None = None

    def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int) -> None:
        super().__init__(model_runner, topk, speculative_num_steps)
        # SGLang's bound is the context's, and a request near its end has the extra step's slot beyond it.
        self.max_context_len += 1
        self.attn_backends = [
            TappedFlashInferStep(
                model_runner,
                skip_prefill=True,
                kv_indptr_buf=self.kv_indptr[step],
                kv_last_page_len_buf=self.kv_last_page_len,
            )
            for step in range(speculative_num_steps - 1)
        ]

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what captured dense layers read."""
        if self.needs_cpu_seq_lens:
            super().init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare the steps of an eager round."""
        if self.needs_cpu_seq_lens:
            super().init_forward_metadata(forward_batch)
        self._list(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Plan the dense layers of a captured round."""
        if self.needs_cpu_seq_lens:
            super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Record how the lists of a captured round are made."""
        super().init_forward_metadata_in_graph(forward_batch)
        self._list(forward_batch)

    @property
    def needs_cpu_seq_lens(self) -> bool:
        """Whether SGLang must know committed lengths on the host before a round: FlashInfer plans from them."""
        return self.sparse is None or bool(self.sparse.dense_layers)

    def _list(self, forward_batch: Any) -> None:
        """Let step i read, for each branch, the request's list and the branch's own tokens of steps 0 to i."""
        if self.sparse is None or forward_batch.forward_mode.is_idle():
            return
        bs = forward_batch.batch_size
        own = forward_batch.out_cache_loc.view(bs * self.topk, -1)[:, : len(self.attn_backends)]
        lists = self.sparse.lists(forward_batch.req_pool_indices[:bs], forward_batch.seq_lens[:bs], own)
        for backend, listed in zip(self.attn_backends, lists, strict=True):
            backend.listed = listed


class TappedDraftBackendFactory(DraftBackendFactory):
    """SGLang's factory with tapped FlashInfer backends."""

    def _create_flashinfer_decode_backend(self) -> TappedMultiStepBackend:
        return TappedMultiStepBackend(self.draft_model_runner, self.topk, self.speculative_num_steps)

    def _create_flashinfer_prefill_backend(self) -> TappedFlashInferBackend:
        return TappedFlashInferBackend(self.draft_model_runner, skip_prefill=False)
