"""The target's CPU backend of a dustin launch: verification over a selection, and taps for the history queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dustin_sglang.cpu.attention import CpuAttnBackend
from dustin_sglang.tap import ExtendTap

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
        return [
            own if n > positions.shape[1] else own[listed[:n].long()]
            for own, listed, n in zip(slots, positions, counts, strict=True)
        ]
