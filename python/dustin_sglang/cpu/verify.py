"""The target's CPU backend of a dustin launch: verification over a selection, and taps for the history queries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dustin_sglang.cpu.attention import CpuAttnBackend
from dustin_sglang.cpu.segments import Segment
from dustin_sglang.selection.layer_groups import LayerGroups
from dustin_sglang.tap import ExtendTap

if TYPE_CHECKING:
    from dustin_sglang.selection.selector import Selection


class DustinCpuBackend(ExtendTap, CpuAttnBackend):
    """The target's attention: the CPU backend, except that verification reads a selection.

    Parameters
    ----------
    groups
        Layers that share a list.
    """

    def __init__(self, model_runner: Any, groups: LayerGroups) -> None:
        super().__init__(model_runner)
        self._groups = groups
        self._selection: Selection | None = None
        self._listed: list[list[Segment]] | None = None  # a group's segments each; None outside of verification

    def attend_to(self, selection: Selection) -> None:
        """Let the next verification read `selection`."""
        self._selection = selection

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Cut a forward into segments; a verification reads a list a group."""
        self._listed = None
        if forward_batch.forward_mode.is_target_verify():
            lists = [self._listed_slots(forward_batch, group) for group in range(self._groups.count)]
            self._listed = [self._verify_segments(forward_batch, slots) for slots in lists]
        else:
            super().init_forward_metadata(forward_batch)

    def layer_segments(self, layer_id: int) -> list[Segment]:
        """The segments of the layer's group in a verification."""
        return super().layer_segments(layer_id) if self._listed is None else self._listed[self._groups.of(layer_id)]

    def _listed_slots(self, forward_batch: Any, group: int) -> list[torch.Tensor]:
        """KV slots of each request's selected positions in one group, ascending."""
        if self._selection is None:
            raise RuntimeError("a verification was planned before its positions were selected")
        slots = self.committed_slots(forward_batch)
        if self._selection.positions is None:
            return slots
        positions, counts = self._selection.positions[group], self._selection.counts
        kept = counts if self._selection.kept is None else self._selection.kept.tolist()
        return [
            own if most > positions.shape[1] else own[listed[:n].long()]
            for own, listed, n, most in zip(slots, positions, kept, counts, strict=True)
        ]
