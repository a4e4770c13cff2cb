"""Weighted sums of several scores of the same positions: what each group of layers makes of the parts of a signal.

    out[g] = sum_p weights[g, p] * scores[p]

Floor: every score read and every result written once, `4 * (parts + groups)` bytes a position; `parts * groups`
products. One launch over blocks of positions does just that. A GEMM would choose its summation by the batch's size;
here parts are summed in their order, so a request's result has the same bits alone and in any batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_kernels import reference
from dustin_kernels.reference import Backend, check_tensor, use_triton

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _mix_kernel(
    scores_ptr, weights_ptr, out_ptr, count,
    PARTS: tl.constexpr, GROUPS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    groups = tl.arange(0, PADDED)
    total = tl.zeros([PADDED, BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        score = tl.load(scores_ptr + part * count + index, mask=inside, other=0.0)
        weight = tl.load(weights_ptr + groups * PARTS + part, mask=groups < GROUPS, other=0.0)
        total += weight[:, None] * score[None, :]
    real = (groups < GROUPS)[:, None] & inside[None, :]
    tl.store(out_ptr + groups[:, None] * count + index[None, :], total, mask=real)


def mix_scores(scores: Tensor, weights: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Sum parts by weights, for each group.

    Parameters
    ----------
    scores
        float32 [parts, bs, max_len], contiguous.
    weights
        float32 [groups, parts], contiguous.
    backend
        "auto" runs the kernel on CUDA tensors and the reference on others.

    Returns
    -------
    Tensor
        float32 [groups, bs, max_len].

    Raises
    ------
    ValueError
        A shape, dtype, device or stride is not as above.
    RuntimeError
        `backend` is "triton" and the tensors are neither on a GPU nor interpreted.
    """
    check_tensor("scores", scores, [None] * 3, [torch.float32], scores.device)
    check_tensor("weights", weights, [None, scores.shape[0]], [torch.float32], scores.device)
    groups = weights.shape[0]
    if not scores.is_contiguous() or not weights.is_contiguous():
        raise ValueError("scores and weights must be contiguous")
    if not use_triton(backend, scores.device):
        return reference.mix_scores(scores, weights)
    out = torch.empty(groups, *scores.shape[1:], dtype=torch.float32, device=scores.device)
    if out.numel():
        count = out[0].numel()
        _mix_kernel[(triton.cdiv(count, _BLOCK),)](
            scores, weights, out, count,
            PARTS=scores.shape[0], GROUPS=groups, PADDED=triton.next_power_of_2(groups), BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return out
