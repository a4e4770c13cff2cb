"""The selection of one step as the engine runs its default policy: two signals, their sum, the list of slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pools import Workload
from shapes import AttentionShape
from torch import Tensor

from dustin_kernels import mix_scores, score_positions, select_positions, write_slots

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
        int32 [groups, batch * (k + g)]: where the slots of each group of layers go. Several groups weigh the draft's
        layers each in its own way, as `profile.GroupWeights` says.
    """

    def __init__(self, work: Workload, lookahead: str, k: int, kv_indices: Tensor) -> None:
        cell, groups = work.cell, len(kv_indices)
        self._work, self._k, self._kv_indices = work, k, kv_indices
        self.lookahead_heads, self.history_heads = scored_heads(lookahead, cell.target, cell.draft)
        self._lookahead_q = _pick(work.lookahead_queries, self.lookahead_heads)
        self._history_q = _pick(work.history_queries, self.history_heads)
        parts = self.lookahead_heads.layers if groups > 1 else 1
        drawn = torch.rand(groups, parts, generator=torch.Generator().manual_seed(0))
        self._weights = drawn.softmax(1).to(work.device)
        self._lookahead = torch.empty(parts, cell.batch, cell.context, device=work.device)
        self._history = torch.empty(1, cell.batch, cell.context, device=work.device)
        self._positions = torch.empty(groups * cell.batch, k, dtype=torch.int32, device=work.device)
        self._kv_indptr = work.indptr(k + cell.g)

    def score_lookahead(self) -> Tensor:
        """Score by the draft; its cache is one position behind."""
        keys = self._work.draft_keys[: self.lookahead_heads.layers]
        return self._score(self._lookahead_q, keys, self.lookahead_heads, 1, self._lookahead)

    def score_history(self) -> Tensor:
        """Score by the target's layer at two thirds of its depth."""
        keys = [self._work.keys[len(self._work.keys) * 2 // 3]]
        return self._score(self._history_q, keys, self.history_heads, 0, self._history)

    def _score(self, q: Tensor, keys: list[Tensor], heads: ScoredHeads, shift: int, out: Tensor) -> Tensor:
        work, parts = self._work, len(out)
        factors = (parts / (q.shape[1] * len(heads.kv_heads)),) * len(heads.kv_heads)
        return score_positions(
            q, keys, heads.layer_of_head, heads.kv_heads, work.req_to_token, work.req_pool_indices, work.seq_lens,
            heads.shape.head_dim**-0.5, max_len=work.cell.context, shift=shift, parts=parts, head_weights=factors,
            out=out.flatten(0, 1),
        )  # fmt: skip

    def select(self) -> Tensor:
        """Choose by the signals as they are, for all groups in one launch."""
        groups = len(self._weights)
        ahead = mix_scores(self._lookahead, self._weights) if groups > 1 else self._lookahead
        total = torch.lerp(self._history, ahead, 0.5)
        return select_positions(
            None, total.flatten(0, 1), self._work.seq_lens.repeat(groups),
            budget=self._k, sinks=SINKS, window=WINDOW, num_lookahead=0, out=self._positions,
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
