"""Attention of a few query rows over a list of KV slots: the arithmetic of the CPU backend, free of SGLang types."""

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

# Up to this many rows the query heads that share a KV head are folded into the rows, so that K is read once for all.
FOLD_ROWS = 16
# Longer queries run in blocks of this many rows, so that masks stay small and columns that no row of a block may see
# are not computed.
BLOCK_ROWS = 512


class CausalMask:
    """Additive masks for queries that are the last rows of their context, of any size, cut from one tensor.

    Row i of a ``[rows, columns]`` mask sees columns up to ``columns - rows + i``. Aligned at their lower right corner,
    all such masks are parts of the largest one, so a forward pass builds only that.

    Parameters
    ----------
    rows, columns : int
        Size of the largest mask asked for; more than `BLOCK_ROWS` rows are never needed at once.
    dtype : torch.dtype
        That of the queries.
    """

    def __init__(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        rows = min(rows, BLOCK_ROWS)
        self._mask = torch.full((rows, columns), float("-inf"), dtype=dtype).triu(columns - rows + 1)

    def view(self, rows: int, columns: int) -> torch.Tensor:
        """The ``[rows, columns]`` mask, without a copy."""
        return self._mask[self._mask.shape[0] - rows :, self._mask.shape[1] - columns :]


@dataclass(frozen=True)
class Segment:
    """The part of a forward pass that belongs to one request.

    Attributes
    ----------
    rows : slice
        Its rows in the flat query.
    slots : Tensor, int64 ``[kv]``
        KV slots to attend to; the rows' own slots included.
    mask : Tensor ``[rows, kv]``, `CausalMask` or None
        Added to the scores. A `CausalMask` means that the rows are the last ones of the context; None hides nothing.
    """

    rows: slice
    slots: torch.Tensor
    mask: torch.Tensor | CausalMask | None = None

    @property
    def num_rows(self) -> int:
        """Number of query rows."""
        return int(self.rows.stop - self.rows.start)


def attend(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, segment: Segment, scale: float
) -> torch.Tensor:
    """Attention of one segment.

    Parameters
    ----------
    query : Tensor ``[rows, q_heads, head_dim]``
    k_cache, v_cache : Tensor ``[slots, kv_heads, head_dim]`` (``v_head_dim`` for values)
    segment : Segment
    scale : float

    Returns
    -------
    Tensor ``[rows, q_heads, v_head_dim]``
    """
    key = k_cache.index_select(0, segment.slots).transpose(0, 1)  # [kv_heads, kv, head_dim]
    value = v_cache.index_select(0, segment.slots).transpose(0, 1)
    if segment.num_rows <= FOLD_ROWS:
        return _attend_folded(query, key, value, segment, scale)
    return _attend_blocks(query, key, value, segment, scale)


def _attend_folded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segment: Segment, scale: float
) -> torch.Tensor:
    rows, q_heads, head_dim = query.shape
    kv_heads, columns, _ = key.shape
    group = q_heads // kv_heads
    mask = segment.mask
    if isinstance(mask, CausalMask):
        mask = mask.view(rows, columns) if rows > 1 else None
    if mask is not None:
        mask = mask.to(query.dtype).repeat(group, 1)
    folded = query.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, group * rows, head_dim)
    out = scaled_dot_product_attention(folded[None], key[None], value[None], attn_mask=mask, scale=scale)[0]
    return out.view(kv_heads, group, rows, -1).permute(2, 0, 1, 3).reshape(rows, q_heads, -1)


def _attend_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segment: Segment, scale: float
) -> torch.Tensor:
    rows, columns = query.shape[0], key.shape[1]
    q, k, v = query.transpose(0, 1)[None], key[None], value[None]
    gqa = q.shape[1] != k.shape[1]
    if not isinstance(segment.mask, CausalMask):
        mask = None if segment.mask is None else segment.mask.to(q.dtype)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)
    elif rows == columns:
        # No context before the rows: torch's own causal path needs no mask at all.
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=gqa)
    else:
        blocks = []
        for start in range(0, rows, BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, rows)
            seen = columns - rows + stop
            blocks.append(
                scaled_dot_product_attention(
                    q[:, :, start:stop],
                    k[:, :, :seen],
                    v[:, :, :seen],
                    attn_mask=segment.mask.view(stop - start, seen).to(q.dtype),
                    scale=scale,
                    enable_gqa=gqa,
                )
            )
        out = torch.cat(blocks, dim=2)
    return out[0].transpose(0, 1)
