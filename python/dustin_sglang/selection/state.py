"""The queries that outlive a forward pass: static buffers that recorded copies write, and one row kept a request."""

from __future__ import annotations

import torch

from dustin_sglang.selection.heads import Heads


class QueryStore:
    """Post-RoPE queries of one model's scoring heads.

    All buffers are allocated once, so a copy into them can be recorded in a CUDA graph.

    - *kept*: one query a request slot, of its last confirmed token. It survives between steps, while requests move
      within the batch.
    - *pending*: the rows of a forward that verifies or extends, until acceptance says which of them is confirmed.
    - *ahead*: the rows of the draft's decode steps, in batch order, of this round only.

    Parameters
    ----------
    heads
        The scoring heads (this rank's).
    num_heads, head_dim
        Query heads a layer on this rank and their width.
    num_slots
        Request slots, padding included.
    max_batch
        Most requests of one forward, padding included.
    pending_rows
        Rows a request of a verifying or extending forward.
    steps, branches
        Draft decode steps a round and rows a request of one; 0 steps for a target.
    """

    def __init__(
        self,
        heads: Heads,
        num_heads: int,
        head_dim: int,
        *,
        num_slots: int,
        max_batch: int,
        pending_rows: int,
        steps: int = 0,
        branches: int = 1,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.heads, self.branches = heads, branches
        shape = (heads.count, head_dim)
        self.kept = torch.zeros((num_slots, *shape), dtype=dtype, device=device)
        self._pending = torch.zeros((max_batch * pending_rows, *shape), dtype=dtype, device=device)
        self._ahead = torch.zeros((steps, max_batch * branches, *shape), dtype=dtype, device=device)
        self._columns = {
            layer: None if chosen == tuple(range(num_heads)) else torch.tensor(chosen, device=device)
            for layer, chosen in heads.by_layer
        }
        self._forward: list[torch.Tensor] = []  # of the layers of a forward that have run

    def write_ahead(self, step: int, layer: int, q: torch.Tensor) -> None:
        """Copy the scoring heads of `q` ``[batch * branches, num_heads, head_dim]``, layer by layer; recordable."""
        self._copy(self._ahead[step], layer, q)

    def write_pending(self, layer: int, q: torch.Tensor) -> None:
        """Copy the scoring heads of `q` ``[batch * pending_rows, num_heads, head_dim]`` likewise; recordable."""
        self._copy(self._pending, layer, q)

    def keep(self, layer: int, q: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep `q` ``[batch, num_heads, head_dim]`` for the request slots int64 ``[batch]``."""
        if layer in self._columns:
            start, end = self.heads.offsets[layer]
            self.kept[slots, start:end] = self._scoring(layer, q).to(self.kept.dtype)

    def keep_pending(self, index: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep the pending rows `index` int64 ``[batch]`` for the request slots int64 ``[batch]``."""
        self.kept[slots] = self._pending[index]

    def queries(self, slots: torch.Tensor, *, drafted: bool = True) -> torch.Tensor:
        """All rows that speak for a batch: those of this round's decode steps, if it has drafted, then the kept row.

        Returns
        -------
        torch.Tensor
            ``[batch, steps * branches + 1, heads, head_dim]``; ``[batch, 1, heads, head_dim]`` before the draft.
        """
        batch, steps = slots.shape[0], self._ahead.shape[0]
        kept = self.kept[slots].unsqueeze(1)
        if steps == 0 or not drafted:
            return kept
        ahead = self._ahead[:, : batch * self.branches].unflatten(1, (batch, self.branches))
        return torch.cat([ahead.transpose(0, 1).flatten(1, 2), kept], dim=1)

    def _copy(self, rows: torch.Tensor, layer: int, q: torch.Tensor) -> None:
        """Copy a forward's queries once its last scoring layer has run: in one launch, where a layer takes 2.4 us."""
        if layer not in self._columns:
            return
        if layer == self.heads.layers[0]:
            self._forward = []  # what a forward that ended early has left
        self._forward.append(self._scoring(layer, q))
        if layer == self.heads.layers[-1]:
            torch.cat(self._forward, dim=1, out=rows[: q.shape[0]])
            self._forward = []

    def _scoring(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        columns = self._columns[layer]
        return q if columns is None else q.index_select(1, columns)
