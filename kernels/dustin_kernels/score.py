"""Attention scores of a few query heads over the whole context, summed over rows and heads.

For request b, head h with KV head c of pool layer l, and query row r, with n = seq_lens[b] (the softmax of Vaswani et
al., 2017, eq. 1, summed; its maximum and sum are combined block by block as in Milakov and Gimelshein, 2018):

    score[b, j + shift] = sum_{r, h} w[h] * exp(x[r, h, j] - max_i x[r, h, i]) / sum_i exp(x[r, h, i] - max x)
    x[r, h, j] = sm_scale * q[b, r, h] . K_l[slot(b, j), c]            slot(b, j) = req_to_token[req_pool_indices[b], j]

Floor
-----
Bytes: every K row of each distinct (layer, KV head) once, `n * D * itemsize`, plus 4n of slots and 4n of scores,
however many query rows and heads share the KV head. FLOPs: `2 * M * D * n` a KV head for M = rows * query heads, plus
M * n exponentials. The softmax denominators depend on the whole context, so one read of K suffices only if the logits
stay on the chip.

Here
----
Two launches. (1) Maximum and sum of exponentials of each chunk of the context and query row; the program that finishes
a KV head's last chunk combines them. (2) Normalise and sum. Launch (2) needs the logits again: either (1) stores them
in float32 (8 bytes a query row and position, written and read), or (2) multiplies again and reads K twice; it starts
with what (1) read last, part of which is still in L2. Whichever moves fewer bytes is taken. That depends on M, D and
the dtype only, never on the batch, so a request's scores have the same bits alone and in any batch. M is padded to a
tile of 16, 32 or 64, and a KV head with fewer query heads than others to as many as they have.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from dustin_kernels import reference
from dustin_kernels.parts import part_counters
from dustin_kernels.reference import Backend, check_tensor, use_triton
from dustin_kernels.score_kernels import statistics_kernel, sum_again_kernel, sum_stored_kernel

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CHUNK = 1024  # positions whose statistics one program takes
_TILE_BYTES = 16384  # of K in a step of its loop: 64 positions of head_dim 128 in 16 bits
_SUM_BLOCK = 64  # positions of a program that reads K again: the rows of Hopper's smallest product


@dataclass(frozen=True)
class _Groups:
    """Query heads by the KV head that they read, as the kernels index them."""

    keys: tuple[tuple[int, int], ...]  # (layer, KV head), sorted
    heads: Tensor  # int32 [groups, size], -1 where a group has fewer heads
    weights: Tensor  # float32 [groups, size], 0 where a group has fewer heads
    size: int


@lru_cache(maxsize=64)
def _group_heads(
    layer_of_head: tuple[int, ...],
    kv_head_of_head: tuple[int, ...],
    head_weights: tuple[float, ...] | None,
    device: torch.device,
) -> _Groups:
    members: dict[tuple[int, int], list[int]] = {}
    for head, key in enumerate(zip(layer_of_head, kv_head_of_head)):
        members.setdefault(key, []).append(head)
    keys = tuple(sorted(members))
    size = max(len(heads) for heads in members.values())
    table = [members[key] + [-1] * (size - len(members[key])) for key in keys]
    of_head = head_weights or (1.0,) * len(layer_of_head)
    weights = [[of_head[head] if head >= 0 else 0.0 for head in row] for row in table]
    return _Groups(
        keys,
        torch.tensor(table, dtype=torch.int32, device=device),
        torch.tensor(weights, dtype=torch.float32, device=device),
        size,
    )


@lru_cache(maxsize=64)
def _locate_keys(
    keys: tuple[tuple[int, int], ...], pools: tuple[tuple[int, int, int], ...], itemsize: int, device: torch.device
) -> tuple[Tensor, int]:
    """Where each group's keys are, in elements: offset from the first pool's start, and stride from slot to slot.

    `pools` holds (address, slot stride, head stride) of each pool. Offsets rather than addresses let the kernels keep
    one typed pointer. Also returns a number that divides all of the table: 16 where the loads can be vectors, else 1.
    """
    table = []
    for layer, kv_head in keys:
        address, slot_stride, head_stride = pools[layer]
        offset, rest = divmod(address - pools[0][0], itemsize)
        if rest:
            raise ValueError(f"k_cache[{layer}] is not aligned with k_cache[0] to its {itemsize}-byte elements")
        table.append((offset + kv_head * head_stride, slot_stride))
    align = 16 if all(value % 16 == 0 for row in table for value in row) else 1
    return torch.tensor(table, dtype=torch.int64, device=device), align


def _row_tile(rows: int, itemsize: int) -> int:
    """Query rows of a tile.

    float32 products have no tensor cores in full precision and keep their operands in registers: there only 16 fit.
    """
    return 16 if itemsize == 4 else min(64, max(16, triton.next_power_of_2(rows)))


def _block_size(head_dim: int, itemsize: int, tile: int) -> int:
    """Positions of a step, which takes as many registers as they and query rows make products."""
    return max(16, min(64 if tile == 64 else 128, _TILE_BYTES // (head_dim * itemsize)))


def _columns(tile: int, block: int, num_warps: int) -> int:
    """Columns of a tile's row that lie in different threads.

    A warp's product is 8 columns wide, two a thread. Warps lie side by side, or below each other in a tile of 64 rows.
    """
    return min(block, 8 if tile == 64 else 8 * num_warps)


@lru_cache(maxsize=64)
def _are_weights(weights: tuple[float, ...]) -> bool:
    """Whether they can be; a launch gives the same at every step, and there may be hundreds."""
    return all(0 <= weight < math.inf for weight in weights)


def _check(
    q: Tensor,
    k_cache: Sequence[Tensor],
    layer_of_head: tuple[int, ...],
    kv_head_of_head: tuple[int, ...],
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    max_len: int,
    shift: int,
    parts: int,
    head_weights: tuple[float, ...] | None,
    out: Tensor | None,
) -> None:
    device = q.device
    check_tensor("q", q, [None] * 4, _DTYPES, device)
    bs, rows, heads, head_dim = q.shape
    if rows < 1 or heads < 1:
        raise ValueError(f"q has shape {tuple(q.shape)}; it must hold at least one row and one head")
    if not k_cache:
        raise ValueError("k_cache is empty; it must hold one tensor for each scored layer")
    for layer, keys in enumerate(k_cache):
        check_tensor(f"k_cache[{layer}]", keys, [None, None, head_dim], [q.dtype], device)
        if keys.shape != k_cache[0].shape:
            raise ValueError(
                f"k_cache[{layer}] has shape {tuple(keys.shape)}; k_cache[0] has {tuple(k_cache[0].shape)}"
            )
    for name, values, end in (
        ("layer_of_head", layer_of_head, len(k_cache)),
        ("kv_head_of_head", kv_head_of_head, k_cache[0].shape[1]),
    ):
        if len(values) != heads:
            raise ValueError(f"{name} has {len(values)} entries; q has {heads} heads")
        if not all(0 <= value < end for value in values):
            raise ValueError(f"{name} is {values}; its entries must be from 0 to {end - 1}")
    if head_weights is not None and (len(head_weights) != heads or not _are_weights(head_weights)):
        raise ValueError(f"head_weights is {head_weights}; it must hold a finite number of at least 0 for each head")
    check_tensor("req_to_token", req_to_token, [None, None], [torch.int32], device)
    check_tensor("req_pool_indices", req_pool_indices, [bs], [torch.int64, torch.int32], device)
    check_tensor("seq_lens", seq_lens, [bs], [torch.int64, torch.int32], device)
    if not 0 < sm_scale < math.inf:
        raise ValueError(f"sm_scale is {sm_scale}; it must be a finite number above 0")
    if max_len < 0:
        raise ValueError(f"max_len is {max_len}; it must be at least 0")
    if shift < 0:
        raise ValueError(f"shift is {shift}; it must be at least 0")
    if parts < 1 or len(set(zip(layer_of_head, kv_head_of_head))) % parts:
        raise ValueError(f"parts is {parts}; it must be at least 1 and divide the number of pairs of layer and KV head")
    if out is not None:
        check_tensor("out", out, [parts * bs, max_len], [torch.float32], device)


def score_positions(
    q: Tensor,
    k_cache: Sequence[Tensor],
    layer_of_head: tuple[int, ...],
    kv_head_of_head: tuple[int, ...],
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    *,
    max_len: int,
    shift: int = 0,
    parts: int = 1,
    head_weights: tuple[float, ...] | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Sum over query rows and heads of softmax(q K^T * sm_scale) over each request's context.

    The softmax is exact and in float32. A request's scores depend on nothing but the request: not on the batch,
    `max_len` or the slots its context lies in. The first call with new heads or new pools copies two small tables to
    the device (so make one before capturing a CUDA graph); no call waits for it.

    Parameters
    ----------
    q
        Queries after the rotary embedding, [bs, rows, heads, head_dim], float32, float16 or bfloat16.
    k_cache
        One key pool for each scored layer, [num_slots, num_kv_heads, head_dim] each, of q's dtype and of one shape.
        Slots and heads may have any stride.
    layer_of_head, kv_head_of_head
        For each head of `q`, the index of its pool in `k_cache` and of its KV head there.
    req_to_token
        Slot of each position of each pooled request, int32 [pool, width].
    req_pool_indices, seq_lens
        Row of `req_to_token` and committed length of each request, int64 or int32 [bs]. A length of 0 gives a row of
        zeros.
    sm_scale
        Factor of the dot products, above 0, usually 1 / sqrt(head_dim).
    max_len
        Width of the result, at least every seq_len (longer contexts are cut off there).
    shift
        Slot j speaks for position j + shift: 1 for a draft model, whose cache is one position behind. The first `shift`
        positions get 0, and what would land at seq_len or beyond is dropped.
    parts
        Scores of a request: the pairs of layer and KV head that are read, in ascending order, fall into so many parts
        of equal number, and each part's heads are summed by themselves, with the bits of a call of their own.
    head_weights
        What each head's softmax is multiplied by, at least 0; None: 1.
    out
        Result buffer, float32 [parts * bs, max_len], overwritten everywhere.
    backend
        "auto" runs the kernel on CUDA tensors and the reference on others.

    Returns
    -------
    Tensor
        Scores, float32 [parts * bs, max_len], part by part, 0 from seq_len on. Each row sums to rows * heads (of the
        part) when `shift` is 0 and weights are 1.

    Raises
    ------
    ValueError
        A shape, dtype, device, stride, index or range is not as above, or (kernel only) head_dim is no power of two
        from 16 to 256.
    RuntimeError
        `backend` is "triton" and the tensors are neither on a GPU nor interpreted.
    """
    _check(
        q, k_cache, layer_of_head, kv_head_of_head, req_to_token, req_pool_indices, seq_lens, sm_scale, max_len, shift,
        parts, head_weights, out,
    )  # fmt: skip
    if not use_triton(backend, q.device):
        return reference.score_positions(
            q, k_cache, layer_of_head, kv_head_of_head, req_to_token, req_pool_indices, seq_lens, sm_scale,
            max_len=max_len, shift=shift, parts=parts, head_weights=head_weights, out=out,
        )  # fmt: skip
    bs, num_rows, _, head_dim = q.shape
    if head_dim not in (16, 32, 64, 128, 256):
        raise ValueError(f"head_dim is {head_dim}; the kernel takes powers of two from 16 to 256")
    if out is None:
        out = torch.empty(parts * bs, max_len, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out

    _launch(
        q, k_cache, _group_heads(tuple(layer_of_head), tuple(kv_head_of_head), head_weights, q.device), req_to_token,
        req_pool_indices, seq_lens, sm_scale * math.log2(math.e), max_len, shift, parts, out,
    )  # fmt: skip
    return out


def _launch(
    q: Tensor,
    k_cache: Sequence[Tensor],
    groups: _Groups,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scale: float,
    max_len: int,
    shift: int,
    parts: int,
    out: Tensor,
) -> None:
    """Launch both; numbers of warps, stages and positions a program are from a sweep on an H200."""
    bs, num_rows, _, head_dim = q.shape
    pools = tuple((keys.data_ptr(), keys.stride(0), keys.stride(1)) for keys in k_cache)
    located, align = _locate_keys(groups.keys, pools, q.element_size(), q.device)
    num_groups = len(groups.keys)
    m = num_rows * groups.size
    tile = _row_tile(m, q.element_size())
    tiles = triton.cdiv(m, tile)
    limit = min(max_len, req_to_token.shape[1])
    chunks = triton.cdiv(limit, _CHUNK)
    block = _block_size(head_dim, q.element_size(), tile)
    num_warps = 2 if tile == 16 else 4
    store = 8 * m < head_dim * q.element_size()
    pairs = bs * num_groups * tiles

    def buffer(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(max(size, 1), dtype=dtype, device=q.device)

    chunk_max, chunk_sum = buffer(pairs * chunks * tile), buffer(pairs * chunks * tile)
    row_max, row_weight = buffer(pairs * tile), buffer(pairs * tile)
    queries = buffer(0 if store else pairs * tile * head_dim, q.dtype)
    logits = buffer(bs * num_groups * m * chunks * _CHUNK if store else 0)
    if chunks:
        statistics_kernel[(num_groups * tiles, chunks, bs)](
            q, k_cache[0], groups.heads, groups.weights, located, req_to_token, req_pool_indices, seq_lens,
            chunk_max, chunk_sum, row_max, row_weight, part_counters(q.device, pairs), queries, logits,
            scale, limit, chunks, q.stride(0), q.stride(1), q.stride(2), req_to_token.stride(0),
            M=m, TILE=tile, TILES=tiles, SIZE=groups.size, D=head_dim, CHUNK=_CHUNK, BLOCK=block,
            COLUMNS=_columns(tile, block, num_warps), ALIGN=align, STORE=store, STAGES=3, num_warps=num_warps,
        )  # fmt: skip
    if store:
        block = 256
        sum_stored_kernel[(triton.cdiv(max_len, block), bs, parts)](
            logits, seq_lens, row_max, row_weight, out, limit, max_len, chunks, shift, out.stride(0),
            M=m, PADDED=tiles * tile, GROUPS=num_groups // parts, CHUNK=_CHUNK, ROWS=16, BLOCK=block,
            STAGES=2, num_warps=4,
        )  # fmt: skip
    else:
        sum_again_kernel[(triton.cdiv(max_len, _SUM_BLOCK), bs, parts)](
            queries, k_cache[0], located, req_to_token, req_pool_indices, seq_lens, row_max, row_weight, out,
            scale, limit, max_len, shift, req_to_token.stride(0), out.stride(0),
            TILE=tile, TILES=tiles, GROUPS=num_groups // parts, D=head_dim, BLOCK=_SUM_BLOCK, ALIGN=align,
            STAGES=3 if tile == 64 else 2, num_warps=4,
        )  # fmt: skip
