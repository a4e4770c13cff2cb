"""Choose exactly `budget` positions of a long context: sinks, recent window, best by lookahead, best by history.

Scores are ranked by their float32 bits, which order non-negative floats as integers; negative scores, -0 and NaN count
as 0. Equal scores go to the lower position, so the choice is one definite set: kernel and reference agree bit for bit,
and so do tensor-parallel ranks that hold the same scores.

Floor
-----
Bytes: both signals once, `8n`, plus `4 * budget` of output; a few integer operations a score. At bs 16 and n = 131,072
that is 17 MB, 4 us of HBM bandwidth, if the work is spread over the whole GPU.

Here
----
One program a request, so at most bs multiprocessors work. For each signal, the key of the last chosen score is found
two bits a pass: 16 passes count the keys at or above three thresholds (elementwise additions and one reduction a pass;
no histogram, no atomics). One more pass finds the position of the last tie that is taken. A final pass compacts by a
running sum. The history passes read the lookahead too, to leave out what it chose: 53 reads of `4n` in all, from L2 or
L1 after the first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_kernels import reference
from dustin_kernels.reference import Backend, check_tensor, use_triton

_BLOCK = 8192
_WARPS = 32


@triton.jit
def _load_keys(bits_ptr, positions, mask, HAS: tl.constexpr):
    """Ordered keys of float32 bits: 0 for negative numbers, -0 and NaN, and where there is no signal."""
    if HAS:
        bits = tl.load(bits_ptr + positions, mask=mask, other=0)
        keys = tl.where(bits > 0x7F800000, 0, tl.maximum(bits, 0))
    else:
        keys = positions * 0
    return keys


@triton.jit
def _chosen(keys, positions, last_key, last_position):
    """Whether a candidate is among those that `_find_cutoff` counted."""
    return (keys > last_key) | ((keys == last_key) & (positions <= last_position))


@triton.jit
def _candidate_keys(
    bits_ptr, first_ptr, first_key, first_position, positions, low, high,
    HAS: tl.constexpr, HAS_FIRST: tl.constexpr, EXCLUDE: tl.constexpr,
):  # fmt: skip
    """Keys of the positions from low to high - 1 that the first signal did not choose, -1 elsewhere."""
    candidate = (positions >= low) & (positions < high)
    keys = _load_keys(bits_ptr, positions, candidate, HAS)
    if EXCLUDE:
        first = _load_keys(first_ptr, positions, candidate, HAS_FIRST)
        candidate = candidate & (_chosen(first, positions, first_key, first_position) == 0)
    return tl.where(candidate, keys, -1)


@triton.jit
def _find_cutoff(
    bits_ptr, first_ptr, first_key, first_position, low, high, want,
    HAS: tl.constexpr, HAS_FIRST: tl.constexpr, EXCLUDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Key and position of the last of the `want` best candidates: `_chosen` holds for exactly that many.

    The key is the largest one that at least `want` candidates reach; it is built from the top, two bits a pass (the
    last pass adds one). `above` counts the candidates with a larger key.
    """
    key = tl.full((), 0, tl.int32)
    above = tl.full((), 0, tl.int32)
    if HAS:
        for step in range(16):
            shift = tl.maximum(29 - 2 * step, 0)
            reach_1 = tl.zeros([BLOCK], tl.int32)
            reach_2 = tl.zeros([BLOCK], tl.int32)
            reach_3 = tl.zeros([BLOCK], tl.int32)
            for start in range(0, high, BLOCK):
                positions = start + tl.arange(0, BLOCK)
                keys = _candidate_keys(
                    bits_ptr, first_ptr, first_key, first_position, positions, low, high, HAS, HAS_FIRST, EXCLUDE
                )
                reach_1 += (keys >= key + (1 << shift)).to(tl.int32)
                reach_2 += (keys >= key + (2 << shift)).to(tl.int32)
                reach_3 += (keys >= key + (3 << shift)).to(tl.int32)
            count_1, count_2, count_3 = tl.sum(reach_1, 0), tl.sum(reach_2, 0), tl.sum(reach_3, 0)
            digit = (count_1 >= want).to(tl.int32) + (count_2 >= want).to(tl.int32) + (count_3 >= want).to(tl.int32)
            above = tl.where(digit == 2, count_3, above)
            above = tl.where(digit == 1, count_2, above)
            above = tl.where(digit == 0, count_1, above)
            key += digit << shift
    key = tl.where(want > 0, key, 0x7FFFFFFF)

    last = tl.full((), -1, tl.int32)
    seen = tl.full((), 0, tl.int32)
    for start in range(0, high, BLOCK):
        positions = start + tl.arange(0, BLOCK)
        keys = _candidate_keys(
            bits_ptr, first_ptr, first_key, first_position, positions, low, high, HAS, HAS_FIRST, EXCLUDE
        )
        tie = (keys == key).to(tl.int32)
        rank = seen + tl.cumsum(tie, 0)
        last = tl.maximum(last, tl.max(tl.where((tie == 1) & (rank == want - above), positions, -1), 0))
        seen += tl.sum(tie, 0)
    return key, last


@triton.jit(
    do_not_specialize=["width", "budget", "sinks", "window", "num_lookahead"],
    do_not_specialize_on_alignment=["seq_lens_ptr"],
)
def _select_kernel(
    lookahead_ptr, history_ptr, seq_lens_ptr, out_ptr, width, lookahead_row, history_row, out_row,
    budget, sinks, window, num_lookahead,
    HAS_LOOKAHEAD: tl.constexpr, HAS_HISTORY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(seq_lens_ptr + batch), width).to(tl.int32)
    lookahead_ptr += batch * lookahead_row
    history_ptr += batch * history_row
    out_ptr += batch * out_row
    if length <= budget:
        for start in range(0, budget, BLOCK):
            index = start + tl.arange(0, BLOCK)
            tl.store(out_ptr + index, tl.where(index < length, index, -1), mask=index < budget)
        return

    low, high = sinks, length - window
    none = tl.full((), -1, tl.int32)
    first_key, first_position = _find_cutoff(
        lookahead_ptr, lookahead_ptr, none, none, low, high, num_lookahead, HAS_LOOKAHEAD, False, False, BLOCK
    )
    second_key, second_position = _find_cutoff(
        history_ptr, lookahead_ptr, first_key, first_position, low, high, budget - sinks - window - num_lookahead,
        HAS_HISTORY, HAS_LOOKAHEAD, True, BLOCK,
    )  # fmt: skip
    filled = tl.full((), 0, tl.int32)
    for start in range(0, length, BLOCK):
        positions = start + tl.arange(0, BLOCK)
        candidate = (positions >= low) & (positions < high)
        first = _load_keys(lookahead_ptr, positions, candidate, HAS_LOOKAHEAD)
        second = _load_keys(history_ptr, positions, candidate, HAS_HISTORY)
        scored = _chosen(first, positions, first_key, first_position)
        scored = scored | _chosen(second, positions, second_key, second_position)
        keep = (positions < length) & ((candidate == 0) | scored)
        count = keep.to(tl.int32)
        index = filled + tl.cumsum(count, 0) - 1
        tl.store(out_ptr + index, positions, mask=keep)
        filled += tl.sum(count, 0)


def _check(
    lookahead: Tensor | None,
    history: Tensor | None,
    seq_lens: Tensor,
    budget: int,
    sinks: int,
    window: int,
    num_lookahead: int,
    out: Tensor | None,
) -> None:
    if budget <= 0:
        raise ValueError(f"budget is {budget}; it must be at least 1")
    if not 0 <= sinks <= budget:
        raise ValueError(f"sinks is {sinks}; it must be from 0 to {budget} (budget)")
    if not 0 <= window <= budget - sinks:
        raise ValueError(f"window is {window}; it must be from 0 to {budget - sinks} (budget - sinks)")
    free = budget - sinks - window
    if not 0 <= num_lookahead <= free:
        raise ValueError(f"num_lookahead is {num_lookahead}; it must be from 0 to {free} (budget - sinks - window)")
    device = seq_lens.device
    check_tensor("seq_lens", seq_lens, [None], [torch.int64, torch.int32], device)
    bs, width = seq_lens.shape[0], None
    for name, scores in (("lookahead", lookahead), ("history", history)):
        if scores is not None:
            check_tensor(name, scores, [bs, width], [torch.float32], device)
            width = scores.shape[1]
    if out is not None:
        check_tensor("out", out, [bs, budget], [torch.int32], device)


def select_positions(
    lookahead: Tensor | None,
    history: Tensor | None,
    seq_lens: Tensor,
    *,
    budget: int,
    sinks: int,
    window: int,
    num_lookahead: int,
    out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """List the positions that verification reads, ascending, for each request.

    A context of n <= budget positions lists all of them. A longer one lists exactly `budget`: the first `sinks`, the
    last `window`, then the `num_lookahead` others with the best lookahead, then those with the best history among the
    rest. Equal scores go to the lower position. No call waits for the device. Row strides that are multiples of 16 make
    the loads vectors; that and which signals exist are all that the kernel is compiled for.

    Parameters
    ----------
    lookahead, history
        Scores, float32 [bs, width] with any row stride; None stands for all zeros. Negative scores and NaN count as 0.
    seq_lens
        Committed length n of each request, int64 or int32 [bs], at most `width`.
    budget, sinks, window, num_lookahead
        Numbers of positions: listed, protected at the start, protected at the end, and chosen by lookahead.
    out
        Result buffer, int32 [bs, budget], overwritten everywhere.
    backend
        "auto" runs the kernel on CUDA tensors and the reference on others.

    Returns
    -------
    Tensor
        Positions, int32 [bs, budget]; a row with n < budget ends with -1.

    Raises
    ------
    ValueError
        Not 0 < budget, 0 <= sinks, 0 <= window, sinks + window <= budget and 0 <= num_lookahead <= budget - sinks -
        window; or a shape, dtype, device or stride is not as above.
    RuntimeError
        `backend` is "triton" and the tensors are neither on a GPU nor interpreted.
    """
    _check(lookahead, history, seq_lens, budget, sinks, window, num_lookahead, out)
    if not use_triton(backend, seq_lens.device):
        return reference.select_positions(
            lookahead, history, seq_lens,
            budget=budget, sinks=sinks, window=window, num_lookahead=num_lookahead, out=out,
        )  # fmt: skip
    if out is None:
        out = torch.empty(seq_lens.shape[0], budget, dtype=torch.int32, device=seq_lens.device)
    if out.numel() == 0:
        return out
    signals = [scores for scores in (lookahead, history) if scores is not None]
    nothing = out  # a pointer of the right type, never read
    _select_kernel[(seq_lens.shape[0],)](
        nothing if lookahead is None else lookahead.view(torch.int32),
        nothing if history is None else history.view(torch.int32),
        seq_lens, out, signals[0].shape[1] if signals else 2**31 - 1,
        0 if lookahead is None else lookahead.stride(0), 0 if history is None else history.stride(0), out.stride(0),
        budget, sinks, window, num_lookahead,
        HAS_LOOKAHEAD=lookahead is not None, HAS_HISTORY=history is not None, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    return out
