"""The selection of one step as the engine runs it: two signals, the choice, the list of slots."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from pools import Workload
from shapes import AttentionShape
from torch import Tensor

from dustin_kernels import score_positions, select_positions, write_slots

SINKS, WINDOW = 4, 64  # the defaults of --dustin-sinks and --dustin-window


@dataclass(frozen=True)
class ScoredHeads:
    """Query heads that score, the same in each of some layers.

    Attributes
    ----------
    shape
        Of the model.
    layers
        How many.
    heads
        Their numbers.
    """

    shape: AttentionShape
    layers: int
    heads: tuple[int, ...]

    @classmethod
    def spread(cls, shape: AttentionShape, layers: int, count: int | None) -> ScoredHeads:
        """Return `count` heads (None: all), evenly spread; a rank of several holds its share of them."""
        if count is None:
            return cls(shape, layers, tuple(range(shape.heads)))
        count = max(1, count // shape.tp)
        return cls(shape, layers, tuple(index * shape.heads // count for index in range(count)))

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """For each head of all layers the KV head that it reads."""
        return tuple(head * self.shape.kv_heads // self.shape.heads for head in self.heads) * self.layers

    @property
    def layer_of_head(self) -> tuple[int, ...]:
        """For each head of all layers its layer."""
        return tuple(layer for layer in range(self.layers) for _ in self.heads)

    @property
    def distinct_kv_heads(self) -> int:
        """KV heads that are read, over all layers."""
        return len(set(self.kv_heads)) * self.layers


def scored_layers(lookahead: str, draft: AttentionShape) -> int:
    """Draft layers of a lookahead setting: 3, or half of all."""
    return draft.layers // 2 if lookahead == "half" else 3


def scored_heads(lookahead: str, target: AttentionShape, draft: AttentionShape) -> tuple[ScoredHeads, ScoredHeads]:
    """Return the heads of both signals, of lookahead and history.

    "3x4" is the paper's: three draft layers with four heads, one target layer with four. "3xall" has all heads of
    these layers. "half" has all heads of half of the draft's layers, as the automatic profile does for these shapes.
    """
    count = 4 if lookahead == "3x4" else None
    return (
        ScoredHeads.spread(draft, scored_layers(lookahead, draft), count),
        ScoredHeads.spread(target, 1, count),
    )


class SelectionChain:
    """The calls of one step's selection.

    Parameters
    ----------
    work
        Its tensors; history reads the target pool at two thirds of the depth, as the automatic profile does.
    lookahead
        Which heads, see `scored_heads`.
    k
        Positions listed a request.
    kv_indices
        int32 [groups, batch * (k + g)]: where the slots of each group of layers go.
    """

    def __init__(self, work: Workload, lookahead: str, k: int, kv_indices: Tensor) -> None:
        cell, groups = work.cell, len(kv_indices)
        self._work, self._k, self._kv_indices = work, k, kv_indices
        self.lookahead_heads, one = scored_heads(lookahead, cell.target, cell.draft)
        self.history_heads = replace(one, layers=groups)
        self._lookahead_q = _pick(work.lookahead_queries, self.lookahead_heads)
        self._history_q = _pick(work.history_queries, one).repeat(1, 1, groups, 1)
        self._lookahead = torch.empty(cell.batch, cell.context, device=work.device)
        self._history = torch.empty(groups, cell.batch, cell.context, device=work.device)
        self._positions = torch.empty(groups * cell.batch, k, dtype=torch.int32, device=work.device)
        self._kv_indptr = work.indptr(k + cell.g)

    def score_lookahead(self) -> Tensor:
        """Score by the draft; its cache is one position behind."""
        keys = self._work.draft_keys[: self.lookahead_heads.layers]
        return self._score(self._lookahead_q, keys, self.lookahead_heads, 1, self._lookahead, 1)

    def score_history(self) -> Tensor:
        """Score by the target, for each group by the layer at two thirds of its depth."""
        pools, groups = self._work.keys, len(self._history)
        keys = [pools[len(pools) * (3 * group + 2) // (3 * groups)] for group in range(groups)]
        return self._score(self._history_q, keys, self.history_heads, 0, self._history.flatten(0, 1), groups)

    def _score(self, q: Tensor, keys: list[Tensor], heads: ScoredHeads, shift: int, out: Tensor, parts: int) -> Tensor:
        work = self._work
        return score_positions(
            q, keys, heads.layer_of_head, heads.kv_heads, work.req_to_token, work.req_pool_indices, work.seq_lens,
            heads.shape.head_dim**-0.5, max_len=work.cell.context, shift=shift, parts=parts, out=out,
        )  # fmt: skip

    def select(self) -> Tensor:
        """Choose by the signals as they are, for all groups in one launch."""
        groups = len(self._history)
        lookahead = self._lookahead.repeat(groups, 1) if groups > 1 else self._lookahead
        return select_positions(
            lookahead, self._history.flatten(0, 1), self._work.seq_lens.repeat(groups),
            budget=self._k, sinks=SINKS, window=WINDOW, num_lookahead=(self._k - SINKS - WINDOW) // 2,
            out=self._positions,
        )  # fmt: skip

    def write(self) -> None:
        """List the slots of the chosen positions."""
        work = self._work
        for positions, kv_indices in zip(self._positions.split(work.cell.batch), self._kv_indices):
            write_slots(
                positions, work.seq_lens, work.req_pool_indices, work.req_to_token,
                self._kv_indptr, work.cell.g, kv_indices,
            )  # fmt: skip

    def __call__(self) -> None:
        """All of it."""
        self.score_lookahead()
        self.score_history()
        self.select()
        self.write()


def _pick(queries: Tensor, heads: ScoredHeads) -> Tensor:
    """The queries of some heads and layers, [batch, rows, layers * heads, head_dim]."""
    index = torch.tensor(heads.heads, device=queries.device)
    return queries[:, :, : heads.layers, index].flatten(2, 3).contiguous()
