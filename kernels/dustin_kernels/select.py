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
A program keeps its keys in registers. The key of the last chosen score is found bit by bit: a pass counts the keys that
reach a threshold (one comparison a key and one reduction; no histogram, no atomics), and it stops where exactly as many
do as are wanted, which scores that differ reach after about half of the bits. Only ties need a running sum. What that
costs is a program's issue rate and its reductions one after the other, so a long context is shortened first, by many
programs at once: whatever a request lists is, within its chunk of the context, among the chunk's best `num_lookahead`
by lookahead or its best `free` by history (free = budget - sinks - window: of those that history ranks higher, at most
`num_lookahead` are listed already). One program a request then chooses among the shortlists; their order is that of
the positions, so ties need nothing further. On an H200 at bs 8, 32,000 positions and a budget of 512 both launches take
37 us. FlashInfer's radix top-k (deterministic, ties to the lower index) takes 21 us a signal there, and leaves what the
first signal chose in the second, and the list unordered (benchmark/results/kernel_sweep.json).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dustin_kernels import reference
from dustin_kernels.reference import Backend, check_tensor, use_triton

_BLOCK = 8192  # widest batch that is not shortened first
_CHUNK = 4096, 16384  # smallest and largest part of a context with a shortlist of its own
_CHUNKS = 8  # parts that a context has between these


@triton.jit
def _load_keys(bits_ptr, index, mask, HAS: tl.constexpr, ARE_KEYS: tl.constexpr):
    """Ordered keys of float32 bits: 0 for negative numbers, -0 and NaN, and where there is no signal; -1 unmasked."""
    if HAS:
        keys = tl.load(bits_ptr + index, mask=mask, other=0)
        if not ARE_KEYS:
            keys = tl.where(keys > 0x7F800000, 0, tl.maximum(keys, 0))
    else:
        keys = index * 0
    return tl.where(mask, keys, -1)


@triton.jit
def _chosen(keys, index, last_key, last_index):
    """Whether a candidate is among those that `_find_cutoff` counted."""
    return (keys > last_key) | ((keys == last_key) & (index <= last_index))


@triton.jit
def _find_cutoff(keys, index, want):
    """Key and index of the last of the `want` best keys: `_chosen` holds for exactly these.

    Negative keys are no candidates, and there must be at least `want` others. Bit by bit from the top, `key` is the
    largest number that at least `want` keys reach; `above` counts the keys that are larger.
    """
    key = tl.full((), 0, tl.int32)
    above = tl.full((), 0, tl.int32)
    exact = want == 0
    step = tl.full((), 1 << 30, tl.int32)
    while (step > 0) & (exact == 0):
        count = tl.sum((keys >= key + step).to(tl.int32), 0)
        key = tl.where(count >= want, key + step, key)
        above = tl.where(count >= want, above, count)
        exact = count == want
        step = step >> 1
    last_key, last_index = key - 1, tl.full((), -1, tl.int32)
    if want == 0:
        last_key = tl.full((), 0x7FFFFFFF, tl.int32)
    elif exact == 0:
        tie = (keys == key).to(tl.int32)
        last_index = tl.max(tl.where((tie == 1) & (tl.cumsum(tie, 0) == want - above), index, -1), 0)
        last_key = key
    return last_key, last_index


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
    if length <= budget or begin >= length:
        return
    lookahead_ptr += batch * lookahead_row
    history_ptr += batch * history_row
    low, high = tl.maximum(sinks, begin), tl.minimum(length - window, begin + CHUNK)
    candidates, free = tl.maximum(high - low, 0), budget - sinks - window
    positions = begin + tl.arange(0, CHUNK)
    candidate = (positions >= low) & (positions < high)
    first = _load_keys(lookahead_ptr, positions, candidate, HAS_LOOKAHEAD, False)
    second = _load_keys(history_ptr, positions, candidate, HAS_HISTORY, False)
    last_key, last_index = _find_cutoff(first, positions, tl.minimum(num_lookahead, candidates))
    keep = _chosen(first, positions, last_key, last_index)
    wanted = tl.minimum(tl.where(free > num_lookahead, free, 0), candidates)
    last_key, last_index = _find_cutoff(second, positions, wanted)
    keep = candidate & (keep | _chosen(second, positions, last_key, last_index))

    base = (batch * tl.num_programs(0) + chunk) * SIZE
    to = base + tl.cumsum(keep.to(tl.int32), 0) - 1
    tl.store(lookahead_keys_ptr + to, first, mask=keep)
    tl.store(history_keys_ptr + to, second, mask=keep)
    tl.store(positions_ptr + to, positions, mask=keep)
    rest = tl.arange(0, SIZE)
    beyond = rest >= tl.sum(keep.to(tl.int32), 0)
    tl.store(lookahead_keys_ptr + base + rest, -1, mask=beyond)
    tl.store(history_keys_ptr + base + rest, -1, mask=beyond)


@triton.jit(
    do_not_specialize=["width", "budget", "sinks", "window", "num_lookahead"],
    do_not_specialize_on_alignment=["seq_lens_ptr"],
)
def _select_kernel(
    lookahead_ptr, history_ptr, positions_ptr, seq_lens_ptr, out_ptr, width, lookahead_row, history_row, out_row,
    budget, sinks, window, num_lookahead,
    HAS_LOOKAHEAD: tl.constexpr, HAS_HISTORY: tl.constexpr, BLOCK: tl.constexpr,
    SHORTENED: tl.constexpr, CHUNK: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(seq_lens_ptr + batch), width).to(tl.int32)
    out_ptr += batch * out_row
    if length <= budget:
        for start in range(0, budget, STEP):
            entry = start + tl.arange(0, STEP)
            tl.store(out_ptr + entry, tl.where(entry < length, entry, -1), mask=entry < budget)
        return

    index = tl.arange(0, BLOCK)
    if SHORTENED:
        candidate = index < tl.cdiv(length, CHUNK) * SIZE
    else:
        candidate = (index >= sinks) & (index < length - window)
    first = _load_keys(lookahead_ptr + batch * lookahead_row, index, candidate, HAS_LOOKAHEAD, SHORTENED)
    last_key, last_index = _find_cutoff(first, index, num_lookahead)
    keep = candidate & _chosen(first, index, last_key, last_index)
    second = _load_keys(history_ptr + batch * history_row, index, candidate, HAS_HISTORY, SHORTENED)
    second = tl.where(keep, -1, second)
    last_key, last_index = _find_cutoff(second, index, budget - sinks - window - num_lookahead)
    keep = keep | (candidate & _chosen(second, index, last_key, last_index))
    to = sinks + tl.cumsum(keep.to(tl.int32), 0) - 1
    if SHORTENED:
        positions = tl.load(positions_ptr + batch * lookahead_row + index, mask=keep, other=0)
    else:
        positions = index
    tl.store(out_ptr + to, positions, mask=keep)
    for start in range(0, sinks + window, STEP):
        protected = start + tl.arange(0, STEP)
        last = protected >= sinks
        place = tl.where(last, budget - window - sinks, 0) + protected
        position = tl.where(last, length - window - sinks, 0) + protected
        tl.store(out_ptr + place, position, mask=protected < sinks + window)


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
    bs, width = seq_lens.shape[0], signals[0].shape[1] if signals else 2**31 - 1
    nothing = out  # a pointer of the right type, never read
    bits = [nothing if scores is None else scores.view(torch.int32) for scores in (lookahead, history)]
    rows = [0 if scores is None else scores.stride(0) for scores in (lookahead, history)]
    has = dict(HAS_LOOKAHEAD=lookahead is not None, HAS_HISTORY=history is not None)
    numbers = (budget, sinks, window, num_lookahead)

    chunk = min(max(_CHUNK[0], triton.next_power_of_2(triton.cdiv(width, _CHUNKS))), _CHUNK[1])
    free = budget - sinks - window
    size = min(chunk, triton.next_power_of_2(max(1, num_lookahead + (free if free > num_lookahead else 0))))
    positions, block, shorten = nothing, _BLOCK, bool(signals) and width > _BLOCK
    if not signals:
        block = triton.next_power_of_2(budget)  # of equal scores the lowest positions win
    if shorten:
        chunks = triton.cdiv(width, chunk)
        shortlists = torch.empty(3, bs, chunks * size, dtype=torch.int32, device=seq_lens.device)
        _shortlist_kernel[(chunks, bs)](
            *bits, seq_lens, *shortlists, width, *rows, *numbers, **has,
            CHUNK=chunk, SIZE=size, num_warps=_num_warps(chunk),
        )  # fmt: skip
        *bits, positions = shortlists
        rows = [chunks * size] * 2
        has = dict(HAS_LOOKAHEAD=True, HAS_HISTORY=True)
        block = triton.next_power_of_2(max(chunks, _CHUNKS)) * size
    _select_kernel[(bs,)](
        *bits, positions, seq_lens, out, width, *rows, out.stride(0), *numbers, **has,
        BLOCK=block, SHORTENED=shorten, CHUNK=chunk, SIZE=size, STEP=256, num_warps=_num_warps(block),
    )  # fmt: skip


def _num_warps(keys: int) -> int:
    """Warps of a program: enough for its keys to fit into registers, few for cheap reductions."""
    return min(32, max(4, keys // 512))
