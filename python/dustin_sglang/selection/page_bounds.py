"""Scores of whole pages by bounds of their keys (Quest, arXiv 2406.10774, section 3.2)."""

from __future__ import annotations

import torch

from dustin_sglang.selection.context import Context
from dustin_sglang.selection.signals import Signal

PAGE = 16  # positions, as in Quest; independent of SGLang's page size


class PageBounds(Signal):
    """Scores positions by the largest attention that any key of their page could get.

    For a query q and a page whose keys lie between lo and hi in each dimension, no logit exceeds
    ``sum_d max(q_d lo_d, q_d hi_d)``. A softmax over the pages makes the bounds of different heads comparable, then
    heads are summed, since all layers read one list. The bounds are computed anew each time, so this reads as many keys
    as `Signal` does: it compares choices, not speed.
    """

    def score(self, context: Context, *, drafted: bool = True) -> torch.Tensor:
        pages = -(-context.max_len // PAGE)
        queries = self._store.queries(context.req_pool_indices).float()
        shape = (len(self._parts), len(queries), pages)
        by_page = torch.zeros(shape, dtype=torch.float32, device=queries.device)
        for part, own in zip(self._parts, by_page, strict=True):
            weights = (self._store.heads.weights or (1.0,) * len(self._kv_heads))[part]
            heads = list(zip(self._store.heads.layer_index[part], self._kv_heads[part], weights, strict=True))
            for b, rows in enumerate(queries):  # one at a time: the keys of a batch are large
                own[b] = self._page_scores(rows[:, part], heads, context, b, pages)
        if self._reduce is not None:
            by_page = self._reduce(by_page)
        by_position = by_page.repeat_interleave(PAGE, dim=2, output_size=pages * PAGE)[:, :, : context.max_len]
        inside = torch.arange(context.max_len, device=by_page.device) < context.seq_lens.unsqueeze(1)
        return by_position * inside

    def _page_scores(
        self, queries: torch.Tensor, heads: list[tuple[int, int, float]], context: Context, b: int, pages: int
    ) -> torch.Tensor:
        """Float32 ``[pages]`` of request `b` from its queries ``[rows, heads, head_dim]``; 0 beyond its length."""
        inside = torch.arange(pages * PAGE, device=queries.device) < context.seq_lens[b]
        width = context.req_to_token.shape[1]
        positions = torch.arange(pages * PAGE, device=queries.device).clamp(max=width - 1)
        slots = context.req_to_token[context.req_pool_indices[b], positions].long()
        slots = torch.where(inside, slots, 0)
        total = torch.zeros(pages, dtype=torch.float32, device=queries.device)
        paged = inside.view(pages, PAGE)
        for head, (layer, kv_head, weight) in enumerate(heads):
            keys = self._keys[layer][slots, kv_head].float().view(pages, PAGE, -1)
            low = keys.masked_fill(~paged.unsqueeze(2), float("inf")).amin(1)
            high = keys.masked_fill(~paged.unsqueeze(2), float("-inf")).amax(1)
            query = queries[:, head].unsqueeze(1)  # [rows, 1, head_dim]
            bound = torch.maximum(query * low, query * high).sum(-1) * self._sm_scale
            bound = bound.masked_fill(~paged.any(1), float("-inf"))
            total += weight * bound.softmax(-1).sum(0)
        return total
