"""Signals: attention of a few heads over the whole committed context, a float32 score a position.

A score is a mean, so that of a whole context sums to 1 (a little less where the last slots speak for positions that are
not committed yet): signals of different heads and numbers of rows can be added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dustin_kernels import mix_scores, score_positions
from dustin_sglang.selection.context import Context
from dustin_sglang.selection.state import QueryStore


class Signal:
    """Scores positions by what some heads of one model attend to, a mean over rows and, by their weights, heads.

    Parameters
    ----------
    store
        Queries of the scoring heads; under tensor parallelism a rank may hold none of them.
    keys
        K pools of the heads' layers, in order, each ``[num_slots, num_kv_heads, head_dim]``.
    kv_heads
        For each head, the KV head that it reads.
    sm_scale
        Scale of q.K in the model's own attention.
    shift
        1 where slot j holds token j + 1, as SGLang's draft prefill and draft extend leave the draft's KV.
    reduce
        Sums a tensor over tensor-parallel ranks and returns it; None on one rank.
    parts
        For each score, its heads' places in the store; empty where a rank holds none of them. None: one score of all
        heads.
    totals
        For each part the weights of its heads on all ranks, added up; None: those of its heads in the store.
    mix
        float32 ``[groups, parts]``: each group's score is the sum of the parts' by these weights. None: the parts'
        scores themselves.
    """

    def __init__(
        self,
        store: QueryStore,
        keys: Sequence[torch.Tensor],
        kv_heads: tuple[int, ...],
        sm_scale: float,
        *,
        shift: int,
        reduce: Callable[[torch.Tensor], torch.Tensor] | None = None,
        parts: Sequence[slice] | None = None,
        totals: Sequence[float] | None = None,
        mix: torch.Tensor | None = None,
    ) -> None:
        self._store, self._keys, self._kv_heads = store, keys, kv_heads
        self._sm_scale, self._shift, self._reduce, self._mix = sm_scale, shift, reduce, mix
        self._parts = [slice(0, store.heads.count)] if parts is None else list(parts)
        self._weights = store.heads.weights or (1.0,) * store.heads.count
        self._totals = [sum(self._weights[part]) for part in self._parts] if totals is None else list(totals)
        self._factors_of: dict[int, tuple[float, ...]] = {}
        self._scored = _joined(self._parts, store.heads.layer_index, kv_heads)

    def score(self, context: Context, *, drafted: bool = True) -> torch.Tensor:
        """Softmax attention of the stored queries over the context, the mean over rows and, by their weights, heads.

        Parameters
        ----------
        context
            The batch.
        drafted
            Whether the rows of this round's decode steps are there; only the kept row counts otherwise.

        Returns
        -------
        torch.Tensor
            float32 ``[groups or parts, batch, context.max_len]``; 0 beyond a request's length.
        """
        shape = (len(self._parts), context.seq_lens.shape[0], context.max_len)
        scores = torch.empty(shape, dtype=torch.float32, device=context.seq_lens.device)
        queries = self._store.queries(context.req_pool_indices, drafted=drafted)
        factors, first = self._factors(queries.shape[1]), 0
        for places, parts in self._scored:
            own = scores[first : first + parts]
            if places.start == places.stop:
                own.zero_()
            else:
                self._score(queries[:, :, places], places, factors[places], context, own)
            first += parts
        if self._mix is not None:
            scores = mix_scores(scores, self._mix)
        return scores if self._reduce is None else self._reduce(scores)

    def _factors(self, rows: int) -> tuple[float, ...]:
        """What each head's softmax is multiplied by, place by place."""
        if rows not in self._factors_of:
            factors = [0.0] * len(self._weights)
            for part, total in zip(self._parts, self._totals, strict=True):
                # A profile may give all heads of a layer nothing.
                factors[part] = [weight / (rows * total) if total else 0.0 for weight in self._weights[part]]
            self._factors_of[rows] = tuple(factors)
        return self._factors_of[rows]

    def _score(
        self, queries: torch.Tensor, places: slice, factors: tuple[float, ...], context: Context, out: torch.Tensor
    ) -> None:
        """Score by the heads at some places into `out` ``[parts, batch, context.max_len]``."""
        score_positions(
            queries,
            self._keys,
            self._store.heads.layer_index[places],
            self._kv_heads[places],
            context.req_to_token,
            context.req_pool_indices,
            context.seq_lens,
            self._sm_scale,
            max_len=context.max_len,
            shift=self._shift,
            parts=len(out),
            head_weights=factors,
            out=out.flatten(0, 1),
        )


def _joined(parts: Sequence[slice], layer_index: tuple[int, ...], kv_heads: tuple[int, ...]) -> list[tuple[slice, int]]:
    """Places and number of the parts that one call scores: all, if they read as many KV heads each, else one."""
    reads = {len(set(zip(layer_index[part], kv_heads[part], strict=True))) for part in parts}
    if len(reads) == 1 and reads != {0}:
        return [(slice(parts[0].start, parts[-1].stop), len(parts))]
    return [(part, 1) for part in parts]
