"""KV pools of one case, cut out of a single allocation that all cases share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from shapes import AttentionShape
from torch import Tensor

_FILL = 2**28  # elements that are drawn at a time


class Arena:
    """A large bf16 buffer of normal numbers.

    Parameters
    ----------
    num_bytes
        Its size.
    device
        Where it lies.
    """

    def __init__(self, num_bytes: int, device: str) -> None:
        self._numbers = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device)
        for part in self._numbers.split(_FILL):
            part.normal_()
        self._used = 0

    def reset(self) -> None:
        """Give everything back."""
        self._used = 0

    def holds(self, *shape: int) -> int:
        """How many tensors of this shape still fit."""
        return (self._numbers.numel() - self._used) // torch.Size(shape).numel()

    def take(self, *shape: int) -> Tensor:
        """Return the next tensor of this shape; MemoryError where it does not fit."""
        if not self.holds(*shape):
            raise MemoryError(f"a pool of {2 * torch.Size(shape).numel() / 2**30:.1f} GiB does not fit in the arena")
        start = self._used
        self._used += torch.Size(shape).numel()
        return self._numbers[start : self._used].view(shape)


@dataclass(frozen=True)
class Cell:
    """One size of the problem.

    Attributes
    ----------
    target, draft
        Attention shapes of one rank.
    batch, context
        Requests, and committed tokens of each.
    g
        Tokens under verification a request; the draft gives g - 1 query rows.
    slots
        "contiguous" or "scattered": where in the pools a request's tokens lie.
    """

    target: AttentionShape
    draft: AttentionShape
    batch: int
    context: int
    g: int
    slots: str = "contiguous"

    @property
    def num_slots(self) -> int:
        """Slots of all requests."""
        return self.batch * (self.context + self.g)


class Workload:
    """Tensors of a cell: as many layers' pools as the arena holds, at most one a layer.

    Parameters
    ----------
    cell
        The size.
    arena
        Emptied first. MemoryError where it does not hold two layers.
    device
        Where to put the small tensors.
    scored_layers
        Draft layers whose K pools are needed.
    """

    def __init__(self, cell: Cell, arena: Arena, device: str, scored_layers: int) -> None:
        self.cell, self.device = cell, device
        target, draft, slots = cell.target, cell.draft, cell.num_slots
        arena.reset()
        self.draft_keys = [arena.take(slots, draft.kv_heads, draft.head_dim) for _ in range(scored_layers)]
        pool = (slots, target.kv_heads, target.head_dim)
        count = min(target.layers, arena.holds(*pool) // 2)
        if count < 2:
            raise MemoryError(f"two layers of {slots * target.layer_bytes / 2**30:.1f} GiB do not fit in the arena")
        self.keys = [arena.take(*pool) for _ in range(count)]
        self.values = [arena.take(*pool) for _ in range(count)]
        self.q = self._queries(cell.batch * cell.g, target.heads, target.head_dim)
        self.seq_lens = torch.full((cell.batch,), cell.context, device=device)
        self.req_pool_indices = torch.arange(cell.batch, device=device)
        order = torch.randperm if cell.slots == "scattered" else torch.arange
        self.req_to_token = order(slots, device=device).int().view(cell.batch, -1)

    def _queries(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device).bfloat16()

    @property
    def sm_scale(self) -> float:
        """Scale of the target's dot products."""
        return self.cell.target.head_dim**-0.5

    def indptr(self, length: int) -> Tensor:
        """Starts of lists of equal length, int32 [batch + 1]."""
        return torch.arange(self.cell.batch + 1, dtype=torch.int32, device=self.device) * length

    @cached_property
    def lookahead_queries(self) -> Tensor:
        """Queries of all heads of all scored draft layers, [batch, g - 1, layers, heads, head_dim]."""
        cell = self.cell
        return self._queries(cell.batch, cell.g - 1, len(self.draft_keys), cell.draft.heads, cell.draft.head_dim)

    @cached_property
    def history_queries(self) -> Tensor:
        """Queries of all heads of one target layer, [batch, 1, 1, heads, head_dim]."""
        return self._queries(self.cell.batch, 1, 1, self.cell.target.heads, self.cell.target.head_dim)
