"""The draft's CPU backends of a dustin launch: taps for the lookahead queries, lists where drafting is sparse."""

from __future__ import annotations

from typing import Any

import torch

from dustin_sglang.cpu.attention import CpuAttnBackend
from dustin_sglang.cpu.draft_attention import CpuMultiStepDraftBackend
from dustin_sglang.cpu.segments import Segment
from dustin_sglang.sparse_draft import SparseDraft
from dustin_sglang.tap import DecodeTap, ExtendTap


class SparseCpuBackend(CpuAttnBackend):
    """The CPU backend, some of whose layers read a list in some forwards.

    Attributes
    ----------
    sparse
        The lists; None where drafting is dense.
    listed
        Segments of the forward under way in layers that read the list; None where all layers read everything.
    """

    sparse: SparseDraft | None = None
    listed: list[Segment] | None = None

    def layer_segments(self, layer_id: int) -> list[Segment]:
        """The list's segments in sparse layers."""
        if self.listed is None or self.sparse is None or layer_id in self.sparse.dense_layers:
            return super().layer_segments(layer_id)
        return self.listed


class TappedCpuBackend(ExtendTap, SparseCpuBackend):
    """The draft's prefill and draft-extend attention."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Cut a forward into segments; a draft extend reads the list."""
        super().init_forward_metadata(forward_batch)
        self.listed = None
        if self.sparse is not None and forward_batch.forward_mode.is_draft_extend_v2():
            self.listed = self._extend_segments(forward_batch, _context_slots(self.sparse, forward_batch))


class TappedCpuStep(DecodeTap, SparseCpuBackend):
    """The attention of one draft decode step."""


class TappedCpuMultiStepBackend(CpuMultiStepDraftBackend):
    """The draft's decode attention: one tapped backend a step."""

    attn_backends: list[TappedCpuStep]
    sparse: SparseDraft | None = None

    def create_step_backend(self, model_runner: Any, step: int) -> CpuAttnBackend:
        """Build the backend of `step`."""
        return TappedCpuStep(model_runner)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare all steps of a round."""
        super().init_forward_metadata(forward_batch)
        if self.sparse is not None and not forward_batch.forward_mode.is_idle():
            contexts = _context_slots(self.sparse, forward_batch)
            for backend, segments in zip(self.attn_backends, self.step_segments(forward_batch, contexts), strict=True):
                backend.listed = segments


class TappedCpuDraftBackendFactory:
    """What `DraftBackendFactory` is on CUDA."""

    def __init__(self, server_args: Any, draft_model_runner: Any, topk: int, speculative_num_steps: int) -> None:
        self._runner, self._topk, self._steps = draft_model_runner, topk, speculative_num_steps

    def create_decode_backend(self) -> TappedCpuMultiStepBackend:
        """The draft's decode attention."""
        return TappedCpuMultiStepBackend(self._runner, self._topk, self._steps)

    def create_draft_extend_backend(self) -> TappedCpuBackend:
        """The draft's prefill and draft-extend attention."""
        return TappedCpuBackend(self._runner)


def _context_slots(sparse: SparseDraft, forward_batch: Any) -> list[torch.Tensor]:
    """KV slots below each request's length that the draft reads, int64 ``[kv_b]``."""
    (lists,) = sparse.lists(forward_batch.req_pool_indices, forward_batch.seq_lens)
    return [own.long() for own in lists.kv_indices.tensor_split(lists.kv_indptr[1:].long())[:-1]]
