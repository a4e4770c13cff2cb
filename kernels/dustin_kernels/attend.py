"""Attention of a few query rows a request over a list of KV slots."""

from torch import Tensor

from dustin_kernels import reference
from dustin_kernels.reference import Backend


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
    what `tree_mask` says). Lengths are read on the device: nothing is planned, no call waits.

    Parameters
    ----------
    q
        Queries, [bs * rows, heads, head_dim].
    k_cache, v_cache
        Pools, [num_slots, kv_heads, head_dim], of q's dtype; slots and heads may have any stride.
    kv_indptr, kv_indices
        Start of each request in the list, int32 [bs + 1]; the slots, int32. A request with fewer than `rows` entries
        gets zeros.
    rows
        Query rows a request.
    sm_scale
        Factor of the dot products.
    max_kv_len
        At least every list's length, known to the host.
    tree_mask
        Which own token sees which, bool [bs * rows * rows]; None is causal.
    out
        Result buffer like `q`.
    """
    return reference.attend_slots(
        q, k_cache, v_cache, kv_indptr, kv_indices, rows, sm_scale, max_kv_len=max_kv_len, tree_mask=tree_mask, out=out
    )
