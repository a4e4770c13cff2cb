"""Pack the attention mask of a drafted token tree the way FlashInfer reads it.

FlashInfer's `packed_custom_mask` is one bit a pair of query row and KV column, row-major over a request's rows,
little-endian within each byte, each request starting on a byte. The listed context is visible to every row; only the
last g columns, the drafted tokens, differ.

Floor
-----
Bytes: `g * kv_len / 8` written a request (576 at g = 8 and kv_len = 576) and g*g read: less than a launch costs.

Here
----
One launch over the bytes; each of a byte's bits finds its row and column by a division.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_kernels import reference
from dustin_kernels.reference import Backend, check_tensor, use_triton

_BLOCK = 256


@triton.jit(
    do_not_specialize_on_alignment=["tree_mask_ptr", "kv_indptr_ptr", "mask_indptr_ptr", "out_ptr"],
)
def _pack_tree_mask_kernel(
    tree_mask_ptr, kv_indptr_ptr, mask_indptr_ptr, out_ptr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr
):
    batch = tl.program_id(1)
    kv_len = tl.load(kv_indptr_ptr + batch + 1) - tl.load(kv_indptr_ptr + batch)
    num_bits = DRAFTS * kv_len
    num_bytes = (num_bits + 7) // 8
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)
    element = index[:, None] * 8 + bit[None, :]
    columns = tl.maximum(kv_len, 1)  # an empty request divides by it too, and stores nothing
    row = element // columns
    tree_column = element % columns - (kv_len - DRAFTS)
    inside = element < num_bits
    in_tree = inside & (tree_column >= 0)
    tree = tree_mask_ptr + batch.to(tl.int64) * DRAFTS * DRAFTS
    visible = tl.load(tree + row * DRAFTS + tree_column, mask=in_tree, other=0) != 0
    value = inside & (visible | (tree_column < 0))
    packed = tl.sum(value.to(tl.int32) << bit[None, :], 1)
    tl.store(out_ptr + tl.load(mask_indptr_ptr + batch) + index, packed.to(tl.uint8), mask=index < num_bytes)


def pack_tree_mask(
    tree_mask: Tensor,
    kv_indptr: Tensor,
    mask_indptr: Tensor,
    num_draft_tokens: int,
    out: Tensor,
    *,
    max_kv_len: int,
    backend: Backend = "auto",
) -> None:
    """Write each request's packed mask: all of the context, then its block of the tree's mask.

    Request b has g = num_draft_tokens rows and kv_len = kv_indptr[b + 1] - kv_indptr[b] columns. Row r sees column c if
    c < kv_len - g or tree_mask[b, r, c - (kv_len - g)]. Its bits fill ceil(g * kv_len / 8) bytes of `out` from byte
    mask_indptr[b], the last one padded with 0; a request with kv_len 0 writes nothing. No call waits for the device.

    Parameters
    ----------
    tree_mask
        Which drafted token sees which, bool [bs * g * g], contiguous.
    kv_indptr
        Start of each request's columns, int32 [bs + 1]; each request has none or at least g.
    mask_indptr
        Start of each request in `out`, in bytes, int32 [bs + 1] (or [bs]).
    num_draft_tokens
        g.
    out
        Result buffer, uint8, untouched outside the requests' bytes.
    max_kv_len
        At least every kv_len.
    backend
        "auto" runs the kernel on CUDA tensors and the reference on others.

    Raises
    ------
    ValueError
        num_draft_tokens is below 1, or a shape, dtype, device or stride is not as above.
    RuntimeError
        `backend` is "triton" and the tensors are neither on a GPU nor interpreted.
    """
    if num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens is {num_draft_tokens}; it must be at least 1")
    device = kv_indptr.device
    check_tensor("kv_indptr", kv_indptr, [None], [torch.int32], device)
    bs = kv_indptr.shape[0] - 1
    check_tensor("tree_mask", tree_mask, [bs * num_draft_tokens**2], [torch.bool], device)
    check_tensor("mask_indptr", mask_indptr, [None], [torch.int32], device)
    if mask_indptr.shape[0] not in (bs, bs + 1):
        raise ValueError(f"mask_indptr has {mask_indptr.shape[0]} entries; it must have {bs} or {bs + 1}")
    check_tensor("out", out, [None], [torch.uint8], device)
    if not use_triton(backend, device):
        reference.pack_tree_mask(tree_mask, kv_indptr, mask_indptr[:bs], num_draft_tokens, out, max_kv_len=max_kv_len)
    elif bs and max_kv_len:
        max_bytes = triton.cdiv(num_draft_tokens * max_kv_len, 8)
        _pack_tree_mask_kernel[(triton.cdiv(max_bytes, _BLOCK), bs)](
            tree_mask.view(torch.uint8), kv_indptr, mask_indptr, out, DRAFTS=num_draft_tokens, BLOCK=_BLOCK
        )
