"""Write the KV slots that verification reads: the listed positions of each request, then its draft tokens.

Floor
-----
Bytes: 4 a position read, 4 a slot read, 4 a slot written: `12 * (budget + drafts)` a request, 50 KB at bs 8 and 512
positions. A launch (some microseconds) costs more than that traffic. No arithmetic.

Here
----
One launch; every slot is read where its position says, an uncoalesced gather. Only joining it to the selection would
save something: the launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_kernels import reference
from dustin_kernels.reference import Backend, check_tensor, use_triton

_BLOCK = 512


@triton.jit(
    do_not_specialize=["listed", "drafts", "width"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "req_pool_indices_ptr", "kv_indptr_ptr", "kv_indices_ptr"],
)
def _write_slots_kernel(
    positions_ptr, seq_lens_ptr, req_pool_indices_ptr, req_to_token_ptr, kv_indptr_ptr, kv_indices_ptr,
    listed, drafts, width, positions_row, token_row, HAS_POSITIONS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    length = tl.load(seq_lens_ptr + batch).to(tl.int32)
    start = tl.load(kv_indptr_ptr + batch)
    room = tl.load(kv_indptr_ptr + batch + 1) - start
    count = tl.maximum(tl.minimum(tl.minimum(listed, length), room - drafts), 0)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    positions = tl.where(index < count, index, length + index - count)
    if HAS_POSITIONS:
        chosen = tl.load(positions_ptr + batch * positions_row + index, mask=index < count, other=0)
        positions = tl.where(index < count, chosen, positions)
    request = tl.load(req_pool_indices_ptr + batch).to(tl.int64)
    mask = (index < count + drafts) & (index < room)
    slots = tl.load(req_to_token_ptr + request * token_row + positions, mask=mask & (positions < width), other=0)
    tl.store(kv_indices_ptr + start + index, slots, mask=mask)


def write_slots(
    positions: Tensor | None,
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    kv_indptr: Tensor,
    num_draft_tokens: int,
    kv_indices: Tensor,
    *,
    max_len: int | None = None,
    backend: Backend = "auto",
) -> None:
    """Fill `kv_indices` with the slots that each request's verification reads.

    With s = kv_indptr[b], t = req_to_token[req_pool_indices[b]], and n = min(width of positions, seq_lens[b],
    kv_indptr[b + 1] - s - num_draft_tokens), at least 0: kv_indices[s + i] = t[positions[b, i]] for i < n, and
    kv_indices[s + n + j] = t[seq_lens[b] + j] for j < num_draft_tokens. So a request may list less than `positions`
    holds, by a shorter range. Nothing else is touched, and nothing at or beyond kv_indptr[b + 1]: a padded row with an
    empty range is left alone. No call waits for the device.

    Parameters
    ----------
    positions
        Listed positions, int32 [bs, width], as `select_positions` gives them; None lists every position of the context.
    seq_lens, req_pool_indices
        Committed length and row of `req_to_token` of each request, int64 or int32 [bs].
    req_to_token
        Slot of each position of each pooled request, int32 [pool, width], the draft tokens' slots included.
    kv_indptr
        Start of each request in `kv_indices`, int32 [bs + 1].
    num_draft_tokens
        Slots after the committed ones.
    kv_indices
        Result buffer, int32 [at least kv_indptr[bs]].
    max_len
        At least every seq_len; needed where `positions` is None, ignored otherwise.
    backend
        "auto" runs the kernel on CUDA tensors and the reference on others.

    Raises
    ------
    ValueError
        `positions` and `max_len` are both None, num_draft_tokens is negative, or a shape, dtype, device or stride is
        not as above.
    RuntimeError
        `backend` is "triton" and the tensors are neither on a GPU nor interpreted.
    """
    device = seq_lens.device
    check_tensor("seq_lens", seq_lens, [None], [torch.int64, torch.int32], device)
    bs = seq_lens.shape[0]
    if positions is not None:
        check_tensor("positions", positions, [bs, None], [torch.int32], device)
        listed = positions.shape[1]
    elif max_len is None:
        raise ValueError("max_len is None; it must be given where positions is None")
    else:
        listed = max_len
    check_tensor("req_pool_indices", req_pool_indices, [bs], [torch.int64, torch.int32], device)
    check_tensor("req_to_token", req_to_token, [None, None], [torch.int32], device)
    check_tensor("kv_indptr", kv_indptr, [bs + 1], [torch.int32], device)
    check_tensor("kv_indices", kv_indices, [None], [torch.int32], device)
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens}; it must be at least 0")
    if not use_triton(backend, device):
        reference.write_slots(
            positions,
            seq_lens,
            req_pool_indices,
            req_to_token,
            kv_indptr,
            num_draft_tokens,
            kv_indices,
            max_len=max_len,
        )
    elif bs and listed + num_draft_tokens:
        _write_slots_kernel[(triton.cdiv(listed + num_draft_tokens, _BLOCK), bs)](
            kv_indices if positions is None else positions,
            seq_lens, req_pool_indices, req_to_token, kv_indptr, kv_indices,
            listed, num_draft_tokens, req_to_token.shape[1],
            0 if positions is None else positions.stride(0), req_to_token.stride(0),
            HAS_POSITIONS=positions is not None, BLOCK=_BLOCK,
        )  # fmt: skip
