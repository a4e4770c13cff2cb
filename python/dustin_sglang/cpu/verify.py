"""The CPU backends of a dustin launch: verification over a selection, and taps for the scoring heads' queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dustin_sglang.cpu.attention import CpuAttnBackend
from dustin_sglang.cpu.draft_attention import CpuMultiStepDraftBackend
from dustin_sglang.tap import DecodeTap, ExtendTap

if TYPE_CHECKING:
    from dustin_sglang.selection.selector import Selection


class DustinCpuBackend(ExtendTap, CpuAttnBackend):
    """The target's attention: the CPU backend, except that verification reads a selection."""

    _selection: Selection | None = None

    def attend_to(self, selection: Selection) -> None:
        """Let the next verification read `selection`."""
        self._selection = selection

    def verify_slots(self, forward_batch: Any) -> list[torch.Tensor]:
        """KV slots of the selected positions of each request, ascending."""
        if self._selection is None:
            raise RuntimeError("a verification was planned before its positions were selected")
        slots = self.committed_slots(forward_batch)
        positions = self._selection.positions
        if positions is None:
            return slots
        counts = self._selection.counts
        return [own[listed[:n].long()] for own, listed, n in zip(slots, positions, counts, strict=True)]


class TappedCpuBackend(ExtendTap, CpuAttnBackend):
    """The draft's prefill and draft-extend attention."""


class TappedCpuStep(DecodeTap, CpuAttnBackend):
    """The attention of one draft decode step."""


class TappedCpuMultiStepBackend(CpuMultiStepDraftBackend):
    """The draft's decode attention: one tapped backend a step."""

    def create_step_backend(self, model_runner: Any, step: int) -> CpuAttnBackend:
        """Build the backend of `step`."""
        return TappedCpuStep(model_runner)


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
