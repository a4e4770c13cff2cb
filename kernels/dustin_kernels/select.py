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
For each signal, the key of the last chosen score is found two bits a pass: 16 passes count the keys at or above three
thresholds, packed into one reduction a pass (no histogram, no atomics). One more pass finds the last tie that is taken,
and a running sum compacts. That costs a program's issue rate and 16 reductions one after the other, so a long context
is shortened first, by many programs at once: whatever a request lists is, within its chunk of the context, among the
chunk's best `num_lookahead` by lookahead or its best `free` by history (free = budget - sinks - window: of those that
history ranks higher, at most `num_lookahead` are listed already). One program a request then chooses among the
shortlists; their order is that of the positions, so ties need nothing further.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_kernels import reference
from dustin_kernels.reference import Backend, check_tensor, use_triton

_BLOCK = 8192  # keys that a program holds at once; a wider batch is shortened first
_CHUNK = 4096, 16384  # smallest and largest part of a context with a shortlist of its own
_CHUNKS = 8  # parts that a context has between these
_WARPS = 16


@triton.jit
def _load_keys(bits_ptr, index, mask, HAS: tl.constexpr, ARE_KEYS: tl.constexpr):
    """Ordered keys of float32 bits: 0 for negative numbers, -0 and NaN, and where there is no signal."""
    if HAS:
        keys = tl.load(bits_ptr + index, mask=mask, other=0)
        if not ARE_KEYS:
            keys = tl.where(keys > 0x7F800000, 0, tl.maximum(keys, 0))
    else:
        keys = index * 0
    return keys


@triton.jit
def _chosen(keys, index, last_key, last_index):
    """Whether a candidate is among those that `_find_cutoff` counted."""
    return (keys > last_key) | ((keys == last_key) & (index <= last_index))


@triton.jit
def _candidate_keys(
    bits_ptr, first_ptr, first_key, first_index, index, low, high,
    HAS: tl.constexpr, HAS_FIRST: tl.constexpr, EXCLUDE: tl.constexpr, ARE_KEYS: tl.constexpr,
):  # fmt: skip
    """Keys from low to high - 1 that the first signal did not choose, -1 elsewhere."""
    candidate = (index >= low) & (index < high)
    keys = _load_keys(bits_ptr, index, candidate, HAS, ARE_KEYS)
    if EXCLUDE:
        first = _load_keys(first_ptr, index, candidate, HAS_FIRST, ARE_KEYS)
        candidate = candidate & (_chosen(first, index, first_key, first_index) == 0)
    return tl.where(candidate, keys, -1)


@triton.jit
def _find_cutoff(
    bits_ptr, first_ptr, first_key, first_index, begin, low, high, want,
    HAS: tl.constexpr, HAS_FIRST: tl.constexpr, EXCLUDE: tl.constexpr, ARE_KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Key and index of the last of the `want` best candidates from low to high - 1: `_chosen` holds for exactly these.

    The key is the largest one that at least `want` candidates reach; it is built from the top, two bits a pass (the
    last pass adds one). `above` counts the candidates with a larger key. `want` must not exceed the candidates.
    """
    key = tl.full((), 0, tl.int32)
    above = tl.full((), 0, tl.int32)
    if HAS:
        for step in range(16):
            shift = tl.maximum(29 - 2 * step, 0)
            reach = tl.zeros([BLOCK], tl.int64)
            for start in range(begin, high, BLOCK):
                index = start + tl.arange(0, BLOCK)
                keys = _candidate_keys(
                    bits_ptr, first_ptr, first_key, first_index, index, low, high, HAS, HAS_FIRST, EXCLUDE, ARE_KEYS
                )
                reach += (keys >= key + (1 << shift)).to(tl.int64)
                reach += (keys >= key + (2 << shift)).to(tl.int64) << 21
                reach += (keys >= key + (3 << shift)).to(tl.int64) << 42
            counts = tl.sum(reach, 0)
            count_1 = (counts & 0x1FFFFF).to(tl.int32)
            count_2 = ((counts >> 21) & 0x1FFFFF).to(tl.int32)
            count_3 = (counts >> 42).to(tl.int32)
            digit = (count_1 >= want).to(tl.int32) + (count_2 >= want).to(tl.int32) + (count_3 >= want).to(tl.int32)
            above = tl.where(digit == 2, count_3, above)
            above = tl.where(digit == 1, count_2, above)
            above = tl.where(digit == 0, count_1, above)
            key += digit << shift
    key = tl.where(want > 0, key, 0x7FFFFFFF)

    last = tl.full((), -1, tl.int32)
    seen = tl.full((), 0, tl.int32)
    for start in range(begin, high, BLOCK):
        index = start + tl.arange(0, BLOCK)
        keys = _candidate_keys(
            bits_ptr, first_ptr, first_key, first_index, index, low, high, HAS, HAS_FIRST, EXCLUDE, ARE_KEYS
        )
        tie = (keys == key).to(tl.int32)
        rank = seen + tl.cumsum(tie, 0)
        last = tl.maximum(last, tl.max(tl.where((tie == 1) & (rank == want - above), index, -1), 0))
        seen += tl.sum(tie, 0)
    return key, last


@triton.jit(
    do_not_specialize=["width", "budget", "sinks", "window", "num_lookahead"],
    do_not_specialize_on_alignment=["seq_lens_ptr"],
)
def _shortlist_kernel(
    lookahead_ptr, history_ptr, seq_lens_ptr, lookahead_keys_ptr, history_keys_ptr, positions_ptr,
    width, lookahead_row, history_row, budget, sinks, window, num_lookahead,
    HAS_LOOKAHEAD: tl.constexpr, HAS_HISTORY: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write what a chunk of the context may contribute to the list, ascending, keys -1 in what is left of SIZE."""
    chunk, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.minimum(tl.load(seq_lens_ptr + batch), width).to(tl.int32)
    begin = chunk * CHUNK
    low, high = tl.maximum(sinks, begin), tl.minimum(length - window, begin + CHUNK)
    if length <= budget or begin >= length:
        return
    lookahead_ptr += batch * lookahead_row
    history_ptr += batch * history_row
    candidates = tl.maximum(high - low, 0)
    free = budget - sinks - window
    none = tl.full((), -1, tl.int32)
    first_key, first_index = _find_cutoff(
        lookahead_ptr, lookahead_ptr, none, none, begin, low, high, tl.minimum(num_lookahead, candidates),
        HAS_LOOKAHEAD, False, False, False, CHUNK,
    )  # fmt: skip
    second_key, second_index = _find_cutoff(
        history_ptr, history_ptr, none, none, begin, low, high,
        tl.minimum(tl.where(free > num_lookahead, free, 0), candidates), HAS_HISTORY, False, False, False, CHUNK,
    )  # fmt: skip
    positions = begin + tl.arange(0, CHUNK)
    candidate = (positions >= low) & (positions < high)
    first = _load_keys(lookahead_ptr, positions, candidate, HAS_LOOKAHEAD, False)
    second = _load_keys(history_ptr, positions, candidate, HAS_HISTORY, False)
    keep = _chosen(first, positions, first_key, first_index) | _chosen(second, positions, second_key, second_index)
    keep = keep & candidate
    base = (batch * tl.num_programs(0) + chunk) * SIZE
    index = base + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(lookahead_keys_ptr + index, first, mask=keep)
    tl.store(history_keys_ptr + index, second, mask=keep)
    tl.store(positions_ptr + index, positions, mask=keep)
    empty = tl.arange(0, SIZE)
    beyond = empty >= tl.sum(keep.to(tl.int32), 0)
    tl.store(lookahead_keys_ptr + base + empty, -1, mask=beyond)
    tl.store(history_keys_ptr + base + empty, -1, mask=beyond)


@triton.jit(
    do_not_specialize=["width", "budget", "sinks", "window", "num_lookahead"],
    do_not_specialize_on_alignment=["seq_lens_ptr"],
)
def _select_kernel(
    lookahead_ptr, history_ptr, positions_ptr, seq_lens_ptr, out_ptr, width, lookahead_row, history_row, out_row,
    budget, sinks, window, num_lookahead,
    HAS_LOOKAHEAD: tl.constexpr, HAS_HISTORY: tl.constexpr, BLOCK: tl.constexpr,
    SHORTENED: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(seq_lens_ptr + batch), width).to(tl.int32)
    lookahead_ptr += batch * lookahead_row
    history_ptr += batch * history_row
    positions_ptr += batch * lookahead_row
    out_ptr += batch * out_row
    if length <= budget:
        for start in range(0, budget, BLOCK):
            index = start + tl.arange(0, BLOCK)
            tl.store(out_ptr + index, tl.where(index < length, index, -1), mask=index < budget)
        return

    if SHORTENED:
        low, high = 0, tl.cdiv(length, CHUNK) * SIZE
    else:
        low, high = sinks, length - window
    none = tl.full((), -1, tl.int32)
    first_key, first_index = _find_cutoff(
        lookahead_ptr, lookahead_ptr, none, none, 0, low, high, num_lookahead,
        HAS_LOOKAHEAD, False, False, SHORTENED, BLOCK,
    )  # fmt: skip
    second_key, second_index = _find_cutoff(
        history_ptr, lookahead_ptr, first_key, first_index, 0, low, high, budget - sinks - window - num_lookahead,
        HAS_HISTORY, HAS_LOOKAHEAD, True, SHORTENED, BLOCK,
    )  # fmt: skip
    for start in range(0, sinks + window, BLOCK):
        index = start + tl.arange(0, BLOCK)
        last = index >= sinks
        to = tl.where(last, budget - window - sinks, 0) + index
        protected = tl.where(last, length - window - sinks, 0) + index
        tl.store(out_ptr + to, protected, mask=index < sinks + window)
    filled = tl.full((), 0, tl.int32) + sinks
    for start in range(0, high, BLOCK):
        index = start + tl.arange(0, BLOCK)
        candidate = (index >= low) & (index < high)
        first = _load_keys(lookahead_ptr, index, candidate, HAS_LOOKAHEAD, SHORTENED)
        second = _load_keys(history_ptr, index, candidate, HAS_HISTORY, SHORTENED)
        keep = _chosen(first, index, first_key, first_index) | _chosen(second, index, second_key, second_index)
        keep = keep & candidate
        count = keep.to(tl.int32)
        to = filled + tl.cumsum(count, 0) - 1
        if SHORTENED:
            positions = tl.load(positions_ptr + index, mask=keep, other=0)
        else:
            positions = index
        tl.store(out_ptr + to, positions, mask=keep)
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
    _launch(lookahead, history, seq_lens, budget, sinks, window, num_lookahead, out)
    return out


def _launch(
    lookahead: Tensor | None,
    history: Tensor | None,
    seq_lens: Tensor,
    budget: int,
    sinks: int,
    window: int,
    num_lookahead: int,
    out: Tensor,
) -> None:
    signals = [scores for scores in (lookahead, history) if scores is not None]
    width = signals[0].shape[1] if signals else 2**31 - 1
    nothing = out  # a pointer of the right type, never read
    bits = [nothing if scores is None else scores.view(torch.int32) for scores in (lookahead, history)]
    rows = [0 if scores is None else scores.stride(0) for scores in (lookahead, history)]
    has = dict(HAS_LOOKAHEAD=lookahead is not None, HAS_HISTORY=history is not None)
    bs, numbers = seq_lens.shape[0], (budget, sinks, window, num_lookahead)

    chunk = min(max(_CHUNK[0], triton.next_power_of_2(triton.cdiv(width, _CHUNKS))), _CHUNK[1])
    free = budget - sinks - window
    size = min(chunk, triton.next_power_of_2(max(1, num_lookahead + (free if free > num_lookahead else 0))))
    shorten = bool(signals) and width > _BLOCK
    positions = nothing
    if shorten:
        chunks = triton.cdiv(width, chunk)
        shortlists = torch.empty(3, bs, chunks * size, dtype=torch.int32, device=seq_lens.device)
        _shortlist_kernel[(chunks, bs)](
            *bits, seq_lens, *shortlists, width, *rows, *numbers, **has,
            CHUNK=chunk, SIZE=size, num_warps=max(4, min(_WARPS, chunk // 512)),
        )  # fmt: skip
        *bits, positions = shortlists
        rows = [chunks * size] * 2
        has = dict(HAS_LOOKAHEAD=True, HAS_HISTORY=True)
    _select_kernel[(bs,)](
        *bits, positions, seq_lens, out, width, *rows, out.stride(0), *numbers, **has,
        BLOCK=_BLOCK, SHORTENED=shorten, CHUNK=chunk, SIZE=size, num_warps=_WARPS,
    )  # fmt: skip
