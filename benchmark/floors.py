"""The bytes that any implementation has to move, and the time they take: rooflines of attention and of selection.

Attention of 5 rows is bound by bytes: with 8 query heads a KV head, a bf16 element of K or V takes part in 40 products,
so 40 FLOPs a byte, where an H200 does more than 200.
"""

from __future__ import annotations

from pools import Cell
from selection_chain import ScoredHeads
from shapes import ITEM_BYTES

_INDEX_BYTES = _SCORE_BYTES = 4  # int32 slots and positions, float32 scores


def attention_bytes(cell: Cell, listed: int) -> int:
    """Bytes of one layer's attention over `listed` positions and the g own tokens of each request.

    K and V once, their slots once, queries and output once.
    """
    kv = cell.batch * (listed + cell.g) * (cell.target.layer_bytes + _INDEX_BYTES)
    rows = cell.batch * cell.g * cell.target.heads * cell.target.head_dim
    return kv + 2 * rows * ITEM_BYTES


def score_bytes(cell: Cell, heads: ScoredHeads) -> int:
    """Bytes of one signal: the K rows of each distinct KV head once, the slots once, the scores once."""
    row = heads.distinct_kv_heads * heads.shape.head_dim * ITEM_BYTES
    return cell.batch * cell.context * (row + _INDEX_BYTES + _SCORE_BYTES)


def select_bytes(cell: Cell, k: int) -> int:
    """Bytes of a choice by two signals: both read once, the positions written."""
    return cell.batch * (2 * _SCORE_BYTES * cell.context + _INDEX_BYTES * k)


def write_bytes(cell: Cell, k: int) -> int:
    """Bytes of a slot list: positions read, their slots read, the list written."""
    return cell.batch * _INDEX_BYTES * (k + 2 * (k + cell.g))


def microseconds(num_bytes: int, terabytes_a_second: float) -> float:
    """Time of `num_bytes` at a bandwidth of 10^12 bytes a second."""
    return num_bytes / terabytes_a_second / 1e6
