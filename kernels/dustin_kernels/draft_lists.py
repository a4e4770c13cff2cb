"""Write the KV slots that draft forwards read: each request's last list, the tokens since, a forward's own.

Floor
-----
Bytes: 4 a position read, 4 a slot read and, for each forward, 4 a slot written: at bs 8, 512 positions and four
forwards 0.1 MB. A launch (some microseconds) costs more than that traffic. No arithmetic.

Here
----
One launch for all forwards of a round. Where a row's slots begin depends on the lengths of the rows before it: every
program adds these up by itself, which costs a few loads. Built from torch operations the same took some 115 launches
for a round's decode steps and 50 for its draft extend, 0.3 ms of a 12 ms step (`benchmark/results/gpu_tests.json`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_kernels import reference
from dustin_kernels.reference import Backend, check_tensor, use_triton

_BLOCK = 512
_INTEGERS = [torch.int64, torch.int32]


@triton.jit(
    do_not_specialize=["k", "table_width", "own_first", "rows", "own_row", "indptr_row", "indices_row"],
    do_not_specialize_on_alignment=["req_pool_indices_ptr", "ends_ptr", "own_ptr", "kv_indptr_ptr", "kv_indices_ptr"],
)
def _draft_lists_kernel(
    lists_ptr, counts_ptr, starts_ptr, req_to_token_ptr, req_pool_indices_ptr, ends_ptr, own_ptr,
    kv_indptr_ptr, kv_indices_ptr, k, table_width, own_first, rows,
    list_row, token_row, own_row, indptr_row, indices_row,
    BRANCHES: tl.constexpr, ROWS_TILE: tl.constexpr, OWN_TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, forward = tl.program_id(1), tl.program_id(2)
    every = tl.arange(0, ROWS_TILE)
    real, request = every < rows, every // BRANCHES
    slot = tl.load(req_pool_indices_ptr + request, mask=real, other=0).to(tl.int64)
    start = tl.load(starts_ptr + slot, mask=real, other=1)
    end = tl.load(ends_ptr + request, mask=real, other=1).to(tl.int64)
    skipped = (tl.load(lists_ptr + slot * list_row, mask=real, other=0) == 0).to(tl.int64)
    counts = tl.load(counts_ptr + slot, mask=real, other=0)
    listed = tl.where(start <= k, start - 1, counts - skipped)
    own_count = own_first + forward
    before = tl.sum(tl.where(real & (every < row), listed + end - start + 1 + own_count, 0))

    mine = every == row
    slot, start, end = tl.sum(tl.where(mine, slot, 0)), tl.sum(tl.where(mine, start, 0)), tl.sum(tl.where(mine, end, 0))
    skipped, listed = tl.sum(tl.where(mine, skipped, 0)), tl.sum(tl.where(mine, listed, 0))
    count = listed + end - start + 1
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    taken = tl.where(start > k, listed, 0)
    chosen = tl.load(lists_ptr + slot * list_row + skipped + column, mask=column < taken, other=0) - 1
    whole = tl.where(column < listed, column, start - 1 + column - listed)
    position = tl.where(column < taken, chosen, whole)
    position = tl.minimum(position, table_width - 1)
    slots = tl.load(req_to_token_ptr + slot * token_row + position, mask=column < count, other=0)
    kv_indices_ptr += forward.to(tl.int64) * indices_row + before
    tl.store(kv_indices_ptr + column, slots, mask=column < count)
    if tl.program_id(0) == 0:
        own = tl.arange(0, OWN_TILE)
        own_slots = tl.load(own_ptr + row * own_row + own, mask=own < own_count, other=0)
        tl.store(kv_indices_ptr + count + own, own_slots.to(tl.int32), mask=own < own_count)
        kv_indptr_ptr += forward * indptr_row
        tl.store(kv_indptr_ptr + row + 1, (before + count + own_count).to(tl.int32))
        if row == 0:
            tl.store(kv_indptr_ptr, 0)


def write_draft_lists(
    lists: Tensor,
    counts: Tensor,
    starts: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    ends: Tensor,
    own: Tensor,
    own_first: int,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *,
    max_new: int,
    backend: Backend = "auto",
) -> None:
    """Fill `kv_indptr` and `kv_indices` with what each of several draft forwards reads; recordable in a CUDA graph.

    The draft's KV is shifted by one: its slot j holds token j + 1. Of request slot s with starts[s] = n a forward reads
    the draft positions p - 1 for the first counts[s] positions p > 0 of lists[s], or all below n - 1 where n is at most
    k; then n - 1 to the request's end, exclusive; then own slots, own_first of them in forward 0 and one more in each
    further one. Rows are packed in order; nothing beyond kv_indptr[:, -1] is touched.

    Parameters
    ----------
    lists, counts, starts
        By request slot: positions, ascending and unique, int32 [slots, k]; how many of them count, int64 [slots]; the
        length at which they were chosen, at least 1, int64 [slots].
    req_to_token
        Slot of each position, int32 [slots, width]; positions beyond it read its last one.
    req_pool_indices, ends
        Request slot, and one past the last committed slot to read, at least the start, int64 or int32 [bs].
    own
        Slots of a forward's own tokens, int64 or int32 [rows, n]; rows is bs times the branches of a request.
    own_first
        Own slots that forward 0 reads.
    kv_indptr
        Result, int32 [forwards, rows + 1].
    kv_indices
        Result, int32 [forwards, at least rows * (k + 1 + max_new + n)].
    max_new
        At least every end minus start.
    backend
        "auto" runs the kernel on CUDA tensors and the reference on others.

    Raises
    ------
    ValueError
        A shape, dtype, device or stride is not as above, or forwards would read more own slots than there are.
    RuntimeError
        `backend` is "triton" and the tensors are neither on a GPU nor interpreted.
    """
    device = lists.device
    check_tensor("lists", lists, [None, None], [torch.int32], device)
    slots, k = lists.shape
    for name, tensor in (("counts", counts), ("starts", starts)):
        check_tensor(name, tensor, [slots], [torch.int64], device)
    check_tensor("req_to_token", req_to_token, [slots, None], [torch.int32], device)
    check_tensor("req_pool_indices", req_pool_indices, [None], _INTEGERS, device)
    bs = req_pool_indices.shape[0]
    check_tensor("ends", ends, [bs], _INTEGERS, device)
    check_tensor("own", own, [None, None], _INTEGERS, device)
    rows, own_slots = own.shape
    if bs and (rows == 0 or rows % bs):
        raise ValueError(f"own has {rows} rows; it must have a multiple of the {bs} requests")
    check_tensor("kv_indptr", kv_indptr, [None, rows + 1], [torch.int32], device)
    forwards = kv_indptr.shape[0]
    check_tensor("kv_indices", kv_indices, [forwards, None], [torch.int32], device)
    room = k + 1 + max_new + own_slots
    if kv_indices.shape[1] < rows * room:
        raise ValueError(f"kv_indices has room for {kv_indices.shape[1]} slots a forward; it must have {rows} * {room}")
    if not 0 <= own_first <= own_slots - forwards + 1:
        raise ValueError(f"forwards read {own_first} own slots and up to {forwards - 1} more; there are {own_slots}")
    if not use_triton(backend, device):
        reference.write_draft_lists(
            lists, counts, starts, req_to_token, req_pool_indices, ends, own, own_first, kv_indptr, kv_indices
        )
    elif bs and forwards:
        _draft_lists_kernel[(triton.cdiv(k + 1 + max_new, _BLOCK), rows, forwards)](
            lists, counts, starts, req_to_token, req_pool_indices, ends, own, kv_indptr, kv_indices,
            k, req_to_token.shape[1], own_first, rows,
            lists.stride(0), req_to_token.stride(0), own.stride(0), kv_indptr.stride(0), kv_indices.stride(0),
            BRANCHES=rows // bs, ROWS_TILE=max(64, triton.next_power_of_2(rows)),
            OWN_TILE=triton.next_power_of_2(max(1, own_slots)), BLOCK=_BLOCK,
        )  # fmt: skip
