"""Attention of a few query rows a request over a list of KV slots: verification, and drafting over a list.

Softmax attention (Vaswani et al., 2017, eq. 1) over gathered slots, block by block with a running maximum and sum
(Milakov and Gimelshein, 2018); parts of one list are merged by their maxima and sums.

Floor
-----
Bytes: K and V of every listed slot once, `2 * kv_len * D * itemsize` a KV head, plus 4 a slot for its index; queries,
output and merging are small beside it. At bs 16, 512 slots, 8 KV heads of head_dim 128 in 16 bits that is 33.6 MB,
7.8 us at 4.3 TB/s. FLOPs: `4 * M * D * kv_len` a KV head for M = rows * query heads of a KV head: 2.7 GFLOP there, 4 us
of tensor cores.

Here
----
One launch, nothing planned: lengths are read on the device. A program takes one KV head of one part of one request's
list for all M rows at once, so every slot is read once; its loop keeps the gathers of the next blocks in flight. Where
requests and KV heads alone do not fill the GPU the list is split, and the program that finishes last merges the parts,
which costs an atomic instead of a launch. One request is nothing but latency: rows are then dealt to several programs
too, since the last one's merging would dominate, and K and V come from L2 after the first.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from dustin_kernels import reference
from dustin_kernels.attend_kernel import attend_kernel
from dustin_kernels.parts import part_counters
from dustin_kernels.reference import Backend, check_tensor, use_triton

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_MAX_PARTS = 64
MAX_TREE_ROWS = 64  # a row's mask is one int64
_LOG2_E = math.log2(math.e)


@lru_cache(maxsize=16)
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # interpreted: few, so that small tests see lists whole and split
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True)
class _Shape:
    """Shape of a launch: query rows, slots of a step, parts of a list, slots of a part, steps in flight."""

    tile: int
    block: int
    parts: int
    slots_per_part: int
    stages: int


def _shape(m: int, pairs: int, max_kv_len: int, key_bytes: int, itemsize: int, multiprocessors: int) -> _Shape:
    """Choose a launch for `m` query rows and `pairs` of request and KV head.

    By a sweep on an H200, benchmark/results/kernel_sweep.json.

    Programs that nearly fill the GPU take whole lists with many small gathers in flight: a second program beside them
    saves less than merging costs. Fewer share lists, to about two a multiprocessor. Few deal out rows as well and take
    a part in one step: with nothing but latency left, every further step and every further part to merge shows.
    """
    few = itemsize == 4 or 4 * pairs <= multiprocessors  # float32 has no tensor cores: there only 16 rows fit
    tile = 16 if few else min(64, max(16, triton.next_power_of_2(m)))
    programs = pairs * triton.cdiv(m, tile)
    possible = 1 if 3 * programs >= 2 * multiprocessors else 2 * multiprocessors // programs
    if possible >= triton.cdiv(max_kv_len, 128):
        block, stages = 128, 2
    elif possible > 1:
        block, stages = 64, 3
    else:
        block, stages = 32, 5
    block = max(16, min(block // max(1, key_bytes // 256), triton.next_power_of_2(max_kv_len)))
    blocks = triton.cdiv(max_kv_len, block)
    blocks_per_part = triton.cdiv(blocks, min(blocks, _MAX_PARTS, possible))
    return _Shape(tile, block, triton.cdiv(blocks, blocks_per_part), blocks_per_part * block, stages)


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    rows: int,
    max_kv_len: int,
    tree_mask: Tensor | None,
    out: Tensor | None,
) -> None:
    device = q.device
    check_tensor("q", q, [None] * 3, _DTYPES, device)
    check_tensor("kv_indptr", kv_indptr, [None], [torch.int32], device)
    check_tensor("kv_indices", kv_indices, [None], [torch.int32], device)
    if rows < 1:
        raise ValueError(f"rows is {rows}; it must be at least 1")
    bs = kv_indptr.shape[0] - 1
    if bs < 0 or q.shape[0] != bs * rows:
        raise ValueError(f"q has {q.shape[0]} rows; it must have {bs} * {rows} (requests of kv_indptr * rows)")
    check_tensor("k_cache", k_cache, [None, None, q.shape[2]], [q.dtype], device)
    check_tensor("v_cache", v_cache, list(k_cache.shape), [q.dtype], device)
    if k_cache.shape[1] == 0 or q.shape[1] % k_cache.shape[1]:
        raise ValueError(f"q has {q.shape[1]} heads; it must be a multiple of the {k_cache.shape[1]} KV heads")
    if max_kv_len < 0:
        raise ValueError(f"max_kv_len is {max_kv_len}; it must be at least 0")
    if tree_mask is not None:
        check_tensor("tree_mask", tree_mask, [bs * rows * rows], [torch.bool], device)
        if rows > MAX_TREE_ROWS:
            raise ValueError(f"rows is {rows}; with a tree mask it must be at most {MAX_TREE_ROWS}")
    if out is not None:
        check_tensor("out", out, list(q.shape), [q.dtype], device)


def attend_slots(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    rows: int,
    sm_scale: float,
    *,
    max_kv_len: int,
    tree_mask: Tensor | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Attend, for each request, `rows` query rows to the listed KV slots.

    Request b owns rows b * rows to (b + 1) * rows - 1 of `q` and reads slots kv_indices[kv_indptr[b]:kv_indptr[b + 1]],
    whose last `rows` entries are its own tokens: row r sees all entries before those, and of those the first r + 1 (or
    what `tree_mask` says). Lengths are read on the device: nothing is planned, and no call waits. Calls on one device
    must not overlap in time (they share the counters by which parts are merged).

    Parameters
    ----------
    q
        Queries, [bs * rows, heads, head_dim], float32, float16 or bfloat16; rows and heads may have any stride.
    k_cache, v_cache
        Pools, [num_slots, kv_heads, head_dim], of q's dtype; slots and heads may have any stride.
    kv_indptr, kv_indices
        Start of each request in the list, int32 [bs + 1]; the slots, int32. A request with fewer than `rows` entries
        gets zeros.
    rows
        Query rows a request.
    sm_scale
        Factor of the dot products, usually 1 / sqrt(head_dim).
    max_kv_len
        At least every list's length, known to the host: it sets into how many parts lists fall.
    tree_mask
        Which own token sees which, bool [bs * rows * rows], contiguous; None is causal. Every row must see something.
    out
        Result buffer, of q's shape and dtype, overwritten everywhere.
    backend
        "auto" runs the kernel on CUDA tensors and the reference on others.

    Returns
    -------
    Tensor
        [bs * rows, heads, head_dim] of q's dtype; products and sums are float32, weights are rounded to q's dtype.

    Raises
    ------
    ValueError
        A shape, dtype, device, stride or range is not as above, or (kernel only) head_dim is above 256.
    RuntimeError
        `backend` is "triton" and the tensors are neither on a GPU nor interpreted.
    """
    _check(q, k_cache, v_cache, kv_indptr, kv_indices, rows, max_kv_len, tree_mask, out)
    if not use_triton(backend, q.device):
        return reference.attend_slots(
            q, k_cache, v_cache, kv_indptr, kv_indices, rows, sm_scale,
            max_kv_len=max_kv_len, tree_mask=tree_mask, out=out,
        )  # fmt: skip
    heads, head_dim = q.shape[1:]
    if head_dim > 256:
        raise ValueError(f"head_dim is {head_dim}; the kernel takes at most 256")
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.numel() == 0:
        return out
    bs, kv_heads = kv_indptr.shape[0] - 1, k_cache.shape[1]
    _launch(q, k_cache, v_cache, kv_indptr, kv_indices, tree_mask, out, bs, rows, kv_heads, sm_scale, max_kv_len)
    return out


def _launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    tree_mask: Tensor | None,
    out: Tensor,
    bs: int,
    rows: int,
    kv_heads: int,
    sm_scale: float,
    max_kv_len: int,
    shape: _Shape | None = None,
) -> None:
    """Launch, in the shape that is given (benchmarks and tests do) or chosen."""
    heads, head_dim = q.shape[1:]
    m, d, itemsize = rows * heads // kv_heads, max(16, triton.next_power_of_2(head_dim)), q.element_size()
    if shape is None:
        multiprocessors = _num_multiprocessors(q.device)
        shape = _shape(m, bs * kv_heads, max(max_kv_len, 1), d * itemsize, itemsize, multiprocessors)
    tiles, parts = triton.cdiv(m, shape.tile), shape.parts
    pairs = bs * kv_heads * tiles
    nothing = kv_indices  # a pointer of some type, never read
    part_out = part_max = part_sum = counters = nothing
    if parts > 1:
        sizes = [pairs * parts * shape.tile * n for n in (d, 1, 1)]
        workspace = torch.empty(sum(sizes), dtype=torch.float32, device=q.device)
        part_out, part_max, part_sum = workspace.split(sizes)
        counters = part_counters(q.device, pairs)
    attend_kernel[(kv_heads * tiles, parts, bs)](
        q, k_cache, v_cache, kv_indptr, kv_indices, nothing if tree_mask is None else tree_mask.view(torch.uint8), out,
        part_out, part_max, part_sum, counters,
        sm_scale * _LOG2_E, shape.slots_per_part,
        q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
        out.stride(0), out.stride(1),
        ROWS=rows, ROWS_TILE=triton.next_power_of_2(rows), GROUP=heads // kv_heads, TILE=shape.tile, TILES=tiles,
        BLOCK=shape.block, DIM=head_dim, D=d, PARTS=parts, PARTS_TILE=triton.next_power_of_2(parts),
        HAS_TREE=tree_mask is not None, STAGES=shape.stages, num_warps=4,
    )  # fmt: skip
