"""The Triton kernel behind `dustin_kernels.score`, which says what it computes and why so."""

import triton
import triton.language as tl


@triton.jit
def _key_tile(k_ptr, keys_ptr, slots, inside, group, D: tl.constexpr, ALIGN: tl.constexpr):
    """Keys of one group at these slots: [len(slots), D], zero outside. They are read once, so they may leave L2."""
    offset = tl.multiple_of(tl.load(keys_ptr + 2 * group), ALIGN)
    stride = tl.multiple_of(tl.load(keys_ptr + 2 * group + 1), ALIGN)
    keys = k_ptr + offset + slots[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(keys, mask=inside[:, None], other=0.0, eviction_policy="evict_first")


@triton.jit
def _query_tile(
    q_ptr, heads_ptr, group, rows, q_row, q_head, M: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Queries of one group: [len(rows), D], zero for padding. Row m is head m % SIZE in query row m // SIZE."""
    head = tl.load(heads_ptr + group * SIZE + rows % SIZE, mask=rows < M, other=-1)
    dims = tl.arange(0, D)
    offsets = (rows // SIZE)[:, None] * q_row + head[:, None] * q_head + dims[None, :]
    return tl.load(q_ptr + offsets, mask=(head >= 0)[:, None], other=0.0)


@triton.jit
def _combine_chunks(chunk_max_ptr, chunk_sum_ptr, tile, chunks, used, TILE: tl.constexpr, STEP: tl.constexpr):
    """Maximum and sum of exponentials of every row of a tile, from those of all its chunks."""
    rows = tl.arange(0, TILE)
    largest = tl.full([TILE], -1e30, tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, used, STEP):
        chunk = start + tl.arange(0, STEP)
        offsets = (tile * chunks + chunk)[:, None] * TILE + rows[None, :]
        mask = (chunk < used)[:, None]
        chunk_max = tl.load(chunk_max_ptr + offsets, mask=mask, other=-1e30, cache_modifier=".cg")
        chunk_sum = tl.load(chunk_sum_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg")
        new = tl.maximum(largest, tl.max(chunk_max, 0))
        total = total * tl.exp2(largest - new) + tl.sum(chunk_sum * tl.exp2(chunk_max - new[None, :]), 0)
        largest = new
    return largest, total


@triton.jit
def _wait(counter_ptr, count):
    """Return once `count` programs have counted."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire") < count:
        pass


@triton.jit
def _length(seq_lens_ptr, batch, limit):
    return tl.minimum(tl.load(seq_lens_ptr + batch).to(tl.int32), limit)


@triton.jit(
    do_not_specialize=["limit", "max_len", "shift", "bs", "chunks", "lag", "ring", "out_row"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "req_pool_indices_ptr"],
)
def score_kernel(
    q_ptr, k_ptr, heads_ptr, keys_ptr, req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr,
    weights_ptr, block_max_ptr, chunk_max_ptr, chunk_sum_ptr, row_max_ptr, row_scale_ptr, counters_ptr, out_ptr,
    scale, limit, max_len, shift, bs, chunks, lag, ring, q_batch, q_row, q_head, token_row, out_row,
    M: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, COUNT: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One chunk of a unit: its unnormalised weights, or, `lag` units later, their normalised sum.

    COUNT tiles of query rows make units of UNIT tiles each. Programs take their work in the order of tickets, so
    whatever a program waits for is running or done. A tile holds WIDTH rows that are stored.
    """
    units = bs * tl.cdiv(COUNT, UNIT)
    per_unit = (UNIT + 1) * chunks
    ticket = tl.atomic_add(counters_ptr, 1)
    item = ticket % per_unit
    sums = item >= UNIT * chunks
    unit = ticket // per_unit - tl.where(sums, lag, 0)
    if (unit < 0) | (unit >= units):
        return
    batch, first_tile = (unit % bs).to(tl.int64), unit // bs * UNIT
    length = _length(seq_lens_ptr, batch, limit)
    begin = tl.where(sums, item - UNIT * chunks, item // UNIT) * CHUNK
    weighed_ptr = counters_ptr + 1
    summed_ptr = weighed_ptr + units
    arrived_ptr = summed_ptr + units
    base = (unit % ring).to(tl.int64) * UNIT  # where the unit's tiles are in the ring
    blocks = chunks * (CHUNK // BLOCK)

    if sums:
        out_ptr += batch * out_row
        earlier = first_tile > 0
        if not earlier:  # no score belongs there
            for start in range(begin, begin + CHUNK, BLOCK):
                targets = start + tl.arange(0, BLOCK)
                tl.store(out_ptr + targets, 0.0, mask=((targets >= length) | (targets < shift)) & (targets < max_len))
        if begin < length:
            _wait(weighed_ptr + unit, tl.minimum(UNIT, COUNT - first_tile))
            if earlier:
                _wait(summed_ptr + unit - bs, tl.cdiv(length, CHUNK))
            row = tl.arange(0, ROWS)
            member, local = row // WIDTH, row % WIDTH
            tile = first_tile + member
            real = (member < UNIT) & (tile < COUNT) & (tile % TILES * TILE + local < M)
            statistics = (base + member) * TILE + local
            row_max = tl.load(row_max_ptr + statistics, mask=real, other=0.0, cache_modifier=".cg")
            row_scale = tl.load(row_scale_ptr + statistics, mask=real, other=0.0, cache_modifier=".cg")
            weights = weights_ptr + (base * WIDTH + row)[:, None] * chunks * CHUNK
            for start in tl.range(begin, tl.minimum(begin + CHUNK, length), STEP):
                positions = start + tl.arange(0, STEP)
                targets = positions + shift
                inside = targets < length
                block = ((base + member) * blocks + start // BLOCK) * TILE + local
                block_max = tl.load(block_max_ptr + block, mask=real, other=0.0, cache_modifier=".cg")
                factor = tl.exp2(block_max - row_max) * row_scale
                mask = inside[None, :] & real[:, None]
                weight = tl.load(weights + positions[None, :], mask=mask, other=0.0, cache_modifier=".cg")
                scores = tl.sum(weight.to(tl.float32) * factor[:, None], 0)
                scores += tl.load(
                    out_ptr + targets, mask=targets < tl.where(earlier, length, 0), other=0.0, cache_modifier=".cg"
                )
                tl.store(out_ptr + targets, scores, mask=inside)
            tl.debug_barrier()  # every thread's stores come before the one thread's atomic
            tl.atomic_add(summed_ptr + unit, 1, sem="release")
    else:
        member = item % UNIT
        tile = first_tile + member
        if (tile < COUNT) & (begin < length):
            if unit >= ring:  # the unit whose place in the ring this is must be done
                _wait(summed_ptr + unit - ring, tl.cdiv(_length(seq_lens_ptr, (unit - ring) % bs, limit), CHUNK))
            group = tile // TILES
            local = tl.arange(0, TILE)
            rows = tile % TILES * TILE + local
            stored = (local < WIDTH) & (rows < M)
            queries = _query_tile(q_ptr + batch * q_batch, heads_ptr, group, rows, q_row, q_head, M, SIZE, D)
            request = tl.load(req_pool_indices_ptr + batch).to(tl.int64)
            req_to_token_ptr += request * token_row
            weights = weights_ptr + ((base + member) * WIDTH + local)[:, None] * chunks * CHUNK
            largest = tl.full([TILE], -1e30, tl.float32)
            total = tl.zeros([TILE], tl.float32)
            for start in tl.range(begin, tl.minimum(begin + CHUNK, length), BLOCK, num_stages=STAGES):
                positions = start + tl.arange(0, BLOCK)
                inside = positions < length
                slots = tl.load(req_to_token_ptr + positions, mask=inside, other=0).to(tl.int64)
                keys = _key_tile(k_ptr, keys_ptr, slots, inside, group, D, ALIGN)
                logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
                logits = tl.where(inside[None, :], logits, float("-inf"))
                block_max = tl.max(logits, 1)
                exponentials = tl.exp2(logits - block_max[:, None])
                mask = inside[None, :] & stored[:, None]
                tl.store(weights + positions[None, :], exponentials.to(weights_ptr.dtype.element_ty), mask=mask)
                tl.store(block_max_ptr + ((base + member) * blocks + start // BLOCK) * TILE + local, block_max)
                new = tl.maximum(largest, block_max)
                total = total * tl.exp2(largest - new) + tl.sum(exponentials, 1) * tl.exp2(block_max - new)
                largest = new
            statistics = ((base + member) * chunks + begin // CHUNK) * TILE + local
            tl.store(chunk_max_ptr + statistics, largest)
            tl.store(chunk_sum_ptr + statistics, total)
            tl.debug_barrier()
            used = tl.cdiv(length, CHUNK)
            if tl.atomic_add(arrived_ptr + unit * UNIT + member, 1, sem="acq_rel") == used - 1:
                row_max, row_sum = _combine_chunks(chunk_max_ptr, chunk_sum_ptr, base + member, chunks, used, TILE, 32)
                head = tl.load(heads_ptr + group * SIZE + rows % SIZE, mask=rows < M, other=-1)
                tl.store(row_max_ptr + (base + member) * TILE + local, row_max)
                # Padding weighs nothing.
                tl.store(row_scale_ptr + (base + member) * TILE + local, tl.where(head >= 0, 1.0 / row_sum, 0.0))
                tl.debug_barrier()
                tl.atomic_add(weighed_ptr + unit, 1, sem="release")
