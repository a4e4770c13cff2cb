"""Attention scores of a few query heads over the whole context, summed over rows and heads.

For request b, head h with KV head c of pool layer l, and query row r, with n = seq_lens[b] (the softmax of Vaswani et
al., 2017, eq. 1, summed; its maximum and sum are combined block by block as in Milakov and Gimelshein, 2018):

    score[b, j + shift] = sum_{r, h} exp(x[r, h, j] - max_i x[r, h, i]) / sum_i exp(x[r, h, i] - max x)
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
import triton.language as tl
from torch import Tensor

from dustin_kernels import reference
from dustin_kernels.parts import part_counters
from dustin_kernels.reference import Backend, check_tensor, use_triton

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_CHUNK = 1024  # positions whose statistics one program takes
_TILE_BYTES = 16384  # of K in a step of its loop: 64 positions of head_dim 128 in 16 bits


@dataclass(frozen=True)
class _Groups:
    """Query heads by the KV head that they read, as the kernels index them."""

    keys: tuple[tuple[int, int], ...]  # (layer, KV head), sorted
    heads: Tensor  # int32 [groups, size], -1 where a group has fewer heads
    size: int


@lru_cache(maxsize=64)
def _group_heads(layer_of_head: tuple[int, ...], kv_head_of_head: tuple[int, ...], device: torch.device) -> _Groups:
    members: dict[tuple[int, int], list[int]] = {}
    for head, key in enumerate(zip(layer_of_head, kv_head_of_head)):
        members.setdefault(key, []).append(head)
    keys = tuple(sorted(members))
    size = max(len(heads) for heads in members.values())
    table = [members[key] + [-1] * (size - len(members[key])) for key in keys]
    return _Groups(keys, torch.tensor(table, dtype=torch.int32, device=device), size)


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


def _block_size(head_dim: int, itemsize: int) -> int:
    return max(16, min(128, _TILE_BYTES // (head_dim * itemsize)))


@triton.jit
def _key_tile(k_ptr, keys_ptr, slots, inside, group, D: tl.constexpr, ALIGN: tl.constexpr):
    """Keys of one group at these slots: [len(slots), D], zero outside."""
    offset = tl.multiple_of(tl.load(keys_ptr + 2 * group), ALIGN)
    stride = tl.multiple_of(tl.load(keys_ptr + 2 * group + 1), ALIGN)
    dims = tl.arange(0, D)
    return tl.load(k_ptr + offset + slots[:, None] * stride + dims[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _query_tile(
    q_ptr, heads_ptr, group, rows, q_row, q_head, M: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Queries of one group: [len(rows), D], zero for padding. Row m is head m % SIZE in query row m // SIZE."""
    head = tl.load(heads_ptr + group * SIZE + rows % SIZE, mask=rows < M, other=-1)
    dims = tl.arange(0, D)
    offsets = (rows // SIZE)[:, None] * q_row + head[:, None] * q_head + dims[None, :]
    return tl.load(q_ptr + offsets, mask=(head >= 0)[:, None], other=0.0)


@triton.jit
def _combine_chunks(chunk_max_ptr, chunk_sum_ptr, pair, chunks, used, TILE: tl.constexpr, STEP: tl.constexpr):
    """Maximum and sum of exponentials of every row of a tile, from those of all its chunks."""
    rows = tl.arange(0, TILE)
    largest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, used, STEP):
        chunk = start + tl.arange(0, STEP)
        offsets = (pair * chunks + chunk)[:, None] * TILE + rows[None, :]
        mask = (chunk < used)[:, None]
        chunk_max = tl.load(chunk_max_ptr + offsets, mask=mask, other=float("-inf"), cache_modifier=".cg")
        chunk_sum = tl.load(chunk_sum_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg")
        new = tl.maximum(largest, tl.max(chunk_max, 0))
        total = total * tl.exp2(largest - new) + tl.sum(chunk_sum * tl.exp2(chunk_max - new[None, :]), 0)
        largest = new
    return largest, total


@triton.jit(
    do_not_specialize=["limit", "chunks"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "req_pool_indices_ptr"],
)
def _statistics_kernel(
    q_ptr, k_ptr, heads_ptr, keys_ptr, req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr,
    chunk_max_ptr, chunk_sum_ptr, row_max_ptr, row_weight_ptr, counters_ptr, queries_ptr, logits_ptr,
    scale, limit, chunks, q_batch, q_row, q_head, token_row,
    M: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, STORE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    group, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    chunk, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.minimum(tl.load(seq_lens_ptr + batch).to(tl.int32), limit)
    begin = chunk * CHUNK
    if begin >= length:
        return
    request = tl.load(req_pool_indices_ptr + batch).to(tl.int64)
    req_to_token_ptr += request * token_row
    rows = tile * TILE + tl.arange(0, TILE)
    queries = _query_tile(q_ptr + batch * q_batch, heads_ptr, group, rows, q_row, q_head, M, SIZE, D)
    pair = batch * tl.num_programs(0) + tl.program_id(0)
    row = pair * TILE + tl.arange(0, TILE)
    if STORE:
        row_logits = ((batch * tl.num_programs(0) // TILES + group) * M + rows)[:, None] * chunks * CHUNK
    elif chunk == 0:
        tl.store(queries_ptr + row[:, None] * D + tl.arange(0, D)[None, :], queries)
    # In tiles of less than 64 rows a row lies across warps. There every column keeps a maximum of its own, which costs
    # a second exponential and saves two exchanges between warps a step.
    COLUMNS: tl.constexpr = BLOCK if TILE < 64 else 1
    largest = tl.full([TILE, COLUMNS], -1e30, tl.float32)
    total = tl.zeros([TILE, COLUMNS], tl.float32)
    for start in tl.range(begin, tl.minimum(begin + CHUNK, length), BLOCK, num_stages=STAGES):
        positions = start + tl.arange(0, BLOCK)
        inside = positions < length
        slots = tl.load(req_to_token_ptr + positions, mask=inside, other=0).to(tl.int64)
        keys = _key_tile(k_ptr, keys_ptr, slots, inside, group, D, ALIGN)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if STORE:
            tl.store(logits_ptr + row_logits + positions[None, :], logits, mask=inside[None, :] & (rows < M)[:, None])
        logits = tl.where(inside[None, :], logits, float("-inf"))
        if COLUMNS == 1:
            new = tl.maximum(largest, tl.max(logits, 1)[:, None])
            total = total * tl.exp2(largest - new) + tl.sum(tl.exp2(logits - new), 1)[:, None]
        else:
            new = tl.maximum(largest, logits)
            total = total * tl.exp2(largest - new) + tl.exp2(logits - new)
        largest = new
    chunk_max = tl.max(largest, 1)
    chunk_sum = tl.sum(total * tl.exp2(largest - chunk_max[:, None]), 1)

    statistics = (pair * chunks + chunk) * TILE + tl.arange(0, TILE)
    tl.store(chunk_max_ptr + statistics, chunk_max)
    tl.store(chunk_sum_ptr + statistics, chunk_sum)
    tl.debug_barrier()  # every thread's stores come before the one thread's atomic
    used = tl.cdiv(length, CHUNK)
    if tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel") == used - 1:
        row_max, row_sum = _combine_chunks(chunk_max_ptr, chunk_sum_ptr, pair, chunks, used, TILE, 32)
        head = tl.load(heads_ptr + group * SIZE + rows % SIZE, mask=rows < M, other=-1)
        tl.store(row_max_ptr + row, row_max)
        tl.store(row_weight_ptr + row, tl.where(head >= 0, 1.0 / row_sum, 0.0))  # padding weighs nothing
        tl.store(counters_ptr + pair, 0)


@triton.jit(
    do_not_specialize=["limit", "max_len", "shift", "out_row"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "req_pool_indices_ptr"],
)
def _sum_again_kernel(
    queries_ptr, k_ptr, keys_ptr, req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr,
    row_max_ptr, row_weight_ptr, out_ptr,
    scale, limit, max_len, shift, token_row, out_row,
    TILE: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum the weights of all rows, from K."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    length = tl.minimum(tl.load(seq_lens_ptr + batch).to(tl.int32), limit)
    targets = block * BLOCK + tl.arange(0, BLOCK)
    out_ptr += batch * out_row
    if block * BLOCK >= length:
        tl.store(out_ptr + targets, tl.zeros([BLOCK], tl.float32), mask=targets < max_len)
        return
    positions = targets - shift
    inside = (positions >= 0) & (targets < length)
    request = tl.load(req_pool_indices_ptr + batch).to(tl.int64)
    slots = tl.load(req_to_token_ptr + request * token_row + positions, mask=inside, other=0).to(tl.int64)
    rows, dims = tl.arange(0, TILE), tl.arange(0, D)
    queries_ptr += batch * GROUPS * TILES * TILE * D
    row_max_ptr += batch * GROUPS * TILES * TILE
    row_weight_ptr += batch * GROUPS * TILES * TILE
    scores = tl.zeros([TILE, BLOCK], tl.float32)
    # Loaded a step ahead: only what feeds a product is kept in flight by the compiler.
    next_max, next_weight = tl.load(row_max_ptr + rows), tl.load(row_weight_ptr + rows)
    for step in tl.range(0, GROUPS * TILES, 1, num_stages=STAGES):
        row_max, row_weight = next_max, next_weight
        more = step + 1 < GROUPS * TILES
        next_max = tl.load(row_max_ptr + (step + 1) * TILE + rows, mask=more, other=0.0)
        next_weight = tl.load(row_weight_ptr + (step + 1) * TILE + rows, mask=more, other=0.0)
        keys = _key_tile(k_ptr, keys_ptr, slots, inside, step // TILES, D, ALIGN)
        queries = tl.load(queries_ptr + (step * TILE + rows)[:, None] * D + dims[None, :])
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores += tl.exp2(logits - row_max[:, None]) * row_weight[:, None]
    tl.store(out_ptr + targets, tl.where(inside, tl.sum(scores, 0), 0.0), mask=targets < max_len)


@triton.jit(
    do_not_specialize=["limit", "max_len", "chunks", "shift", "out_row"],
    do_not_specialize_on_alignment=["seq_lens_ptr"],
)
def _sum_stored_kernel(
    logits_ptr, seq_lens_ptr, row_max_ptr, row_weight_ptr, out_ptr, limit, max_len, chunks, shift, out_row,
    M: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum the weights of all rows, from stored logits; PADDED is M rounded up to whole tiles."""
    block, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.minimum(tl.load(seq_lens_ptr + batch).to(tl.int32), limit)
    targets = block * BLOCK + tl.arange(0, BLOCK)
    out_ptr += batch * out_row
    if block * BLOCK >= length:
        tl.store(out_ptr + targets, tl.zeros([BLOCK], tl.float32), mask=targets < max_len)
        return
    positions = targets - shift
    inside = (positions >= 0) & (targets < length)
    scores = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, GROUPS * M, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        real = rows < GROUPS * M
        row_logits = (batch * GROUPS * M + rows)[:, None] * chunks * CHUNK
        logits = tl.load(logits_ptr + row_logits + positions[None, :], mask=inside[None, :] & real[:, None], other=0.0)
        row = (batch * GROUPS + rows // M) * PADDED + rows % M
        row_max = tl.load(row_max_ptr + row, mask=real, other=0.0)
        row_weight = tl.load(row_weight_ptr + row, mask=real, other=0.0)
        scores += tl.exp2(logits - row_max[:, None]) * row_weight[:, None]
    tl.store(out_ptr + targets, tl.where(inside, tl.sum(scores, 0), 0.0), mask=targets < max_len)


def _check(
    q: Tensor,
    k_cache: Sequence[Tensor],
    layer_of_head: tuple[int, ...],
    kv_head_of_head: tuple[int, ...],
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    max_len: int,
    shift: int,
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
    check_tensor("req_to_token", req_to_token, [None, None], [torch.int32], device)
    check_tensor("req_pool_indices", req_pool_indices, [bs], [torch.int64, torch.int32], device)
    check_tensor("seq_lens", seq_lens, [bs], [torch.int64, torch.int32], device)
    if max_len < 0:
        raise ValueError(f"max_len is {max_len}; it must be at least 0")
    if shift < 0:
        raise ValueError(f"shift is {shift}; it must be at least 0")
    if out is not None:
        check_tensor("out", out, [bs, max_len], [torch.float32], device)


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
        Factor of the dot products, usually 1 / sqrt(head_dim).
    max_len
        Width of the result, at least every seq_len (longer contexts are cut off there).
    shift
        Slot j speaks for position j + shift: 1 for a draft model, whose cache is one position behind. The first `shift`
        positions get 0, and what would land at seq_len or beyond is dropped.
    out
        Result buffer, float32 [bs, max_len], overwritten everywhere.
    backend
        "auto" runs the kernel on CUDA tensors and the reference on others.

    Returns
    -------
    Tensor
        Scores, float32 [bs, max_len], 0 from seq_len on. Each row sums to rows * heads when `shift` is 0.

    Raises
    ------
    ValueError
        A shape, dtype, device, stride, index or range is not as above, or (kernel only) head_dim is no power of two
        from 16 to 256.
    RuntimeError
        `backend` is "triton" and the tensors are neither on a GPU nor interpreted.
    """
    _check(q, k_cache, layer_of_head, kv_head_of_head, req_to_token, req_pool_indices, seq_lens, max_len, shift, out)
    if not use_triton(backend, q.device):
        return reference.score_positions(
            q, k_cache, layer_of_head, kv_head_of_head, req_to_token, req_pool_indices, seq_lens, sm_scale,
            max_len=max_len, shift=shift, out=out,
        )  # fmt: skip
    bs, num_rows, _, head_dim = q.shape
    if head_dim not in (16, 32, 64, 128, 256):
        raise ValueError(f"head_dim is {head_dim}; the kernel takes powers of two from 16 to 256")
    if out is None:
        out = torch.empty(bs, max_len, dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out

    _launch(
        q, k_cache, _group_heads(tuple(layer_of_head), tuple(kv_head_of_head), q.device), req_to_token,
        req_pool_indices, seq_lens, sm_scale * math.log2(math.e), max_len, shift, out,
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
    block = _block_size(head_dim, q.element_size())
    store = 8 * m < head_dim * q.element_size()
    pairs = bs * num_groups * tiles

    def buffer(size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(max(size, 1), dtype=dtype, device=q.device)

    chunk_max, chunk_sum = buffer(pairs * chunks * tile), buffer(pairs * chunks * tile)
    row_max, row_weight = buffer(pairs * tile), buffer(pairs * tile)
    queries = buffer(0 if store else pairs * tile * head_dim, q.dtype)
    logits = buffer(bs * num_groups * m * chunks * _CHUNK if store else 0)
    if chunks:
        _statistics_kernel[(num_groups * tiles, chunks, bs)](
            q, k_cache[0], groups.heads, located, req_to_token, req_pool_indices, seq_lens,
            chunk_max, chunk_sum, row_max, row_weight, part_counters(q.device, pairs), queries, logits,
            scale, limit, chunks, q.stride(0), q.stride(1), q.stride(2), req_to_token.stride(0),
            M=m, TILE=tile, TILES=tiles, SIZE=groups.size, D=head_dim, CHUNK=_CHUNK, BLOCK=block, ALIGN=align,
            STORE=store, STAGES=3, num_warps=2 if tile == 16 else 4,
        )  # fmt: skip
    if store:
        block = 256
        _sum_stored_kernel[(triton.cdiv(max_len, block), bs)](
            logits, seq_lens, row_max, row_weight, out, limit, max_len, chunks, shift, out.stride(0),
            M=m, PADDED=tiles * tile, GROUPS=num_groups, CHUNK=_CHUNK, ROWS=16, BLOCK=block,
            STAGES=2, num_warps=4,
        )  # fmt: skip
    else:
        block = max(16, block // 2)
        _sum_again_kernel[(triton.cdiv(max_len, block), bs)](
            queries, k_cache[0], located, req_to_token, req_pool_indices, seq_lens, row_max, row_weight, out,
            scale, limit, max_len, shift, req_to_token.stride(0), out.stride(0),
            TILE=tile, TILES=tiles, GROUPS=num_groups, D=head_dim, BLOCK=block, ALIGN=align,
            STAGES=2, num_warps=4,
        )  # fmt: skip
