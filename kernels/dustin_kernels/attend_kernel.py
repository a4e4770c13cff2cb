"""The Triton kernel behind `dustin_kernels.attend`, which says what it computes and why so."""

import triton
import triton.language as tl


@triton.jit
def _visible_own(tree_mask_ptr, batch, row, ROWS: tl.constexpr, ROWS_TILE: tl.constexpr):
    """Bit j of entry m: whether query row[m] sees the request's own token j."""
    own = tl.arange(0, ROWS_TILE)
    offsets = (batch * ROWS + row)[:, None] * ROWS + own[None, :]
    seen = tl.load(tree_mask_ptr + offsets, mask=(row < ROWS)[:, None] & (own < ROWS)[None, :], other=0) != 0
    return tl.sum(seen.to(tl.int64) << own[None, :].to(tl.int64), 1)


@triton.jit
def _merge_parts(
    part_out_ptr, part_max_ptr, part_sum_ptr, pair, PARTS: tl.constexpr, PARTS_TILE: tl.constexpr,
    TILE: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Merged output of all parts of one tile, [TILE, D]."""
    rows, dims = tl.arange(0, TILE), tl.arange(0, D)
    part = tl.arange(0, PARTS_TILE)
    statistics = (pair * PARTS + part)[:, None] * TILE + rows[None, :]
    used = (part < PARTS)[:, None]
    part_max = tl.load(part_max_ptr + statistics, mask=used, other=float("-inf"), cache_modifier=".cg")
    part_sum = tl.load(part_sum_ptr + statistics, mask=used, other=0.0, cache_modifier=".cg")
    largest = tl.max(part_max, 0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(part_sum * tl.exp2(part_max - largest[None, :]), 0)
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    merged = tl.zeros([TILE, D], tl.float32)
    for index in tl.static_range(PARTS):
        one = (pair * PARTS + index) * TILE + rows
        weight = tl.exp2(tl.load(part_max_ptr + one, cache_modifier=".cg") - largest) * inverse
        values = tl.load(part_out_ptr + one[:, None] * D + dims[None, :], cache_modifier=".cg")
        merged += values * weight[:, None]
    return merged


@triton.jit(
    do_not_specialize=["slots_per_part"],
    do_not_specialize_on_alignment=["kv_indptr_ptr", "kv_indices_ptr", "tree_mask_ptr"],
)
def attend_kernel(
    q_ptr, k_ptr, v_ptr, kv_indptr_ptr, kv_indices_ptr, tree_mask_ptr, out_ptr,
    part_out_ptr, part_max_ptr, part_sum_ptr, counters_ptr,
    scale, slots_per_part, q_row, q_head, k_slot, k_head, v_slot, v_head, out_row, out_head,
    ROWS: tl.constexpr, ROWS_TILE: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    BLOCK: tl.constexpr, DIM: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, PARTS_TILE: tl.constexpr,
    HAS_TREE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of one KV head over one part of a list; the last part's program merges."""
    head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    part, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    begin = tl.load(kv_indptr_ptr + batch)
    kv_len = tl.load(kv_indptr_ptr + batch + 1) - begin
    low = part * slots_per_part
    high = tl.minimum(kv_len, low + slots_per_part)
    if kv_len < ROWS:
        high = low

    m = tile * TILE + tl.arange(0, TILE)
    row, q_heads = m // GROUP, head * GROUP + m % GROUP
    dims = tl.arange(0, D)
    real = (row < ROWS)[:, None]
    if DIM != D:
        real = real & (dims < DIM)[None, :]
    offsets = (batch * ROWS + row)[:, None] * q_row + q_heads[:, None] * q_head + dims[None, :]
    queries = tl.load(q_ptr + offsets, mask=real, other=0.0)
    if HAS_TREE:
        visible_own = _visible_own(tree_mask_ptr, batch, row, ROWS, ROWS_TILE)

    k_ptr += head * k_head
    v_ptr += head * v_head
    kv_indices_ptr += begin
    largest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    merged = tl.zeros([TILE, D], tl.float32)
    for start in tl.range(low, high, BLOCK, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < high
        slots = tl.load(kv_indices_ptr + columns, mask=inside, other=0).to(tl.int64)
        if DIM != D:
            wanted = inside[:, None] & (dims < DIM)[None, :]
        else:
            wanted = inside[:, None]
        keys = tl.load(k_ptr + slots[:, None] * k_slot + dims[None, :], mask=wanted, other=0.0)
        values = tl.load(v_ptr + slots[:, None] * v_slot + dims[None, :], mask=wanted, other=0.0)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        own = columns - (kv_len - ROWS)
        if HAS_TREE:
            bits = visible_own[:, None] >> tl.maximum(own, 0)[None, :].to(tl.int64)
            visible = (own < 0)[None, :] | ((bits & 1) != 0)
        else:
            visible = own[None, :] <= row[:, None]
        logits = tl.where(visible & inside[None, :], logits, float("-inf"))
        new = tl.maximum(largest, tl.max(logits, 1))
        reference_max = tl.where(new == float("-inf"), 0.0, new)  # a row that sees nothing here yet
        weights = tl.exp2(logits - reference_max[:, None])
        rescale = tl.exp2(largest - reference_max)
        total = total * rescale + tl.sum(weights, 1)
        merged = merged * rescale[:, None]
        merged = tl.dot(weights.to(values.dtype), values, merged, input_precision="ieee")
        largest = new

    out_ptr += batch * ROWS * out_row
    to = out_ptr + row[:, None] * out_row + q_heads[:, None] * out_head + dims[None, :]
    if PARTS == 1:
        merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(to, merged.to(out_ptr.dtype.element_ty), mask=real)
    else:
        pair = batch * tl.num_programs(0) + tl.program_id(0)
        rows = (pair * PARTS + part) * TILE + tl.arange(0, TILE)
        tl.store(part_out_ptr + rows[:, None] * D + dims[None, :], merged)
        tl.store(part_max_ptr + rows, largest)
        tl.store(part_sum_ptr + rows, total)
        tl.debug_barrier()  # every thread's stores come before the one thread's atomic
        if tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel") == PARTS - 1:
            merged = _merge_parts(part_out_ptr, part_max_ptr, part_sum_ptr, pair, PARTS, PARTS_TILE, TILE, D)
            tl.store(to, merged.to(out_ptr.dtype.element_ty), mask=real)
            tl.store(counters_ptr + pair, 0)
