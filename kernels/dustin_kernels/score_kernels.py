"""The Triton kernels behind `dustin_kernels.score`, which says what they compute and why so."""

import triton
import triton.language as tl


@triton.jit
def _key_tile(k_ptr, keys_ptr, slots, inside, group, D: tl.constexpr, ALIGN: tl.constexpr):
    """Keys of one group at these slots: [len(slots), D], zero outside; `inside` None: all are inside."""
    offset = tl.multiple_of(tl.load(keys_ptr + 2 * group), ALIGN)
    stride = tl.multiple_of(tl.load(keys_ptr + 2 * group + 1), ALIGN)
    pointers = k_ptr + offset + slots[:, None] * stride + tl.arange(0, D)[None, :]
    if inside is None:
        keys = tl.load(pointers)
    else:
        keys = tl.load(pointers, mask=inside[:, None], other=0.0)
    return keys


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
def _add_block(
    largest, total, queries, k_ptr, keys_ptr, req_to_token_ptr, row_logits_ptr, positions, inside, real, group, scale,
    D: tl.constexpr, ALIGN: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Take positions into maximum and sum of exponentials: [rows, columns] of which each has a share of positions.

    A share is what one thread holds of a row, so that nothing is exchanged: two columns of a tensor core's result of 8.
    Positions of a share take one step together, with one exponential beside theirs.
    """
    slots = tl.load(req_to_token_ptr + positions, mask=inside, other=None if inside is None else 0).to(tl.int64)
    keys = _key_tile(k_ptr, keys_ptr, slots, inside, group, D, ALIGN)
    logits = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    if STORE:
        stored = real[:, None] if inside is None else real[:, None] & inside[None, :]
        tl.store(row_logits_ptr + positions[None, :], logits * scale, mask=stored)
    if inside is not None:
        logits = tl.where(inside[None, :], logits, float("-inf"))
    shares = tl.reshape(logits, [largest.shape[0], logits.shape[1] // largest.shape[1], largest.shape[1]])
    new = tl.maximum(largest, tl.max(shares, 1))
    # Scaled after the difference: where a share has seen no position yet, a fused product would leave its rounding.
    total = total * tl.exp2((largest - new) * scale)
    return new, total + tl.sum(tl.exp2(shares * scale - (new * scale)[:, None, :]), 1)


@triton.jit
def _combine_chunks(chunk_max_ptr, chunk_sum_ptr, pair, chunks, used, TILE: tl.constexpr, STEP: tl.constexpr):
    """Maximum and sum of exponentials of every row of a tile, from those of all its chunks."""
    rows = tl.arange(0, TILE)
    largest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, used, STEP):
        chunk = start + tl.arange(0, STEP)
        offsets = (pair * chunks + chunk)[:, None] * TILE + rows[None, :]
        mask = (chunk < used)[:, None]
        chunk_max = tl.load(chunk_max_ptr + offsets, mask=mask, other=float("-inf"), cache_modifier=".cg")
        chunk_sum = tl.load(chunk_sum_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg")
        new = tl.maximum(largest, tl.max(chunk_max, 0))
        total = total * tl.exp2(largest - new) + tl.sum(chunk_sum * tl.exp2(chunk_max - new[None, :]), 0)
        largest = new
    return largest, total


@triton.jit(
    do_not_specialize=["limit", "chunks"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "req_pool_indices_ptr"],
)
def statistics_kernel(
    q_ptr, k_ptr, heads_ptr, head_weights_ptr, keys_ptr, req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr,
    chunk_max_ptr, chunk_sum_ptr, row_max_ptr, row_weight_ptr, counters_ptr, queries_ptr, logits_ptr,
    scale, limit, chunks, q_batch, q_row, q_head, token_row,
    M: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr, STORE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Maximum and sum of a chunk's exponentials for every row; the last chunk's program combines them."""
    group, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    chunk, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.minimum(tl.load(seq_lens_ptr + batch).to(tl.int32), limit)
    begin = chunk * CHUNK
    if begin >= length:
        return
    request = tl.load(req_pool_indices_ptr + batch).to(tl.int64)
    req_to_token_ptr += request * token_row
    rows = tile * TILE + tl.arange(0, TILE)
    queries = _query_tile(q_ptr + batch * q_batch, heads_ptr, group, rows, q_row, q_head, M, SIZE, D)
    pair = batch * tl.num_programs(0) + tl.program_id(0)
    row = pair * TILE + tl.arange(0, TILE)
    row_logits_ptr = logits_ptr
    if STORE:
        row_logits_ptr += ((batch * tl.num_programs(0) // TILES + group) * M + rows)[:, None] * chunks * CHUNK
    elif chunk == 0:
        tl.store(queries_ptr + row[:, None] * D + tl.arange(0, D)[None, :], queries)
    largest = tl.full([TILE, COLUMNS], -1e30, tl.float32)
    total = tl.zeros([TILE, COLUMNS], tl.float32)
    # Masks would be a tenth of the instructions, so only a request's last chunk has them. It does without a pipeline,
    # whose buffers would stand beside the other loop's.
    end = tl.minimum(begin + CHUNK, length)
    whole = begin + CHUNK if begin + CHUNK <= length else begin
    for start in tl.range(begin, whole, BLOCK, num_stages=STAGES):
        largest, total = _add_block(
            largest, total, queries, k_ptr, keys_ptr, req_to_token_ptr, row_logits_ptr, start + tl.arange(0, BLOCK),
            None, rows < M, group, scale, D, ALIGN, STORE,
        )  # fmt: skip
    for start in tl.range(whole, end, BLOCK, num_stages=1):
        positions = start + tl.arange(0, BLOCK)
        largest, total = _add_block(
            largest, total, queries, k_ptr, keys_ptr, req_to_token_ptr, row_logits_ptr, positions, positions < end,
            rows < M, group, scale, D, ALIGN, STORE,
        )  # fmt: skip
    chunk_max = tl.max(largest, 1)
    chunk_sum = tl.sum(total * tl.exp2((largest - chunk_max[:, None]) * scale), 1)
    chunk_max *= scale

    statistics = (pair * chunks + chunk) * TILE + tl.arange(0, TILE)
    tl.store(chunk_max_ptr + statistics, chunk_max)
    tl.store(chunk_sum_ptr + statistics, chunk_sum)
    tl.debug_barrier()  # every thread's stores come before the one thread's atomic
    used = tl.cdiv(length, CHUNK)
    if tl.atomic_add(counters_ptr + pair, 1, sem="acq_rel") == used - 1:
        row_max, row_sum = _combine_chunks(chunk_max_ptr, chunk_sum_ptr, pair, chunks, used, TILE, 32)
        head_weight = tl.load(head_weights_ptr + group * SIZE + rows % SIZE, mask=rows < M, other=0.0)
        tl.store(row_max_ptr + row, row_max)
        tl.store(row_weight_ptr + row, head_weight / row_sum)  # padding weighs nothing
        tl.store(counters_ptr + pair, 0)


@triton.jit(
    do_not_specialize=["limit", "max_len", "shift", "out_row"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "req_pool_indices_ptr"],
)
def sum_again_kernel(
    queries_ptr, k_ptr, keys_ptr, req_to_token_ptr, req_pool_indices_ptr, seq_lens_ptr,
    row_max_ptr, row_weight_ptr, out_ptr,
    scale, limit, max_len, shift, token_row, out_row,
    TILE: tl.constexpr, TILES: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, ALIGN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum the weights of all rows of a part of the groups, from K; GROUPS is a part's.

    Positions are the rows of the products, and a thread adds up what it holds of one before it keeps it: two columns of
    every 8.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    part = tl.program_id(2)
    length = tl.minimum(tl.load(seq_lens_ptr + batch).to(tl.int32), limit)
    targets = block * BLOCK + tl.arange(0, BLOCK)
    out_ptr += (part * tl.num_programs(1) + batch) * out_row
    if block * BLOCK >= length:
        tl.store(out_ptr + targets, tl.zeros([BLOCK], tl.float32), mask=targets < max_len)
        return
    positions = targets - shift
    inside = (positions >= 0) & (targets < length)
    request = tl.load(req_pool_indices_ptr + batch).to(tl.int64)
    slots = tl.load(req_to_token_ptr + request * token_row + positions, mask=inside, other=0).to(tl.int64)
    rows, dims = tl.arange(0, TILE), tl.arange(0, D)
    first = (batch * tl.num_programs(2) + part) * GROUPS
    queries_ptr += first * TILES * TILE * D
    row_max_ptr += first * TILES * TILE
    row_weight_ptr += first * TILES * TILE
    keys_ptr += 2 * part * GROUPS
    scores = tl.zeros([BLOCK, 8], tl.float32)
    # Loaded a step ahead: only what feeds a product is kept in flight by the compiler.
    next_max, next_weight = tl.load(row_max_ptr + rows), tl.load(row_weight_ptr + rows)
    for step in tl.range(0, GROUPS * TILES, 1, num_stages=STAGES):
        row_max, row_weight = next_max, next_weight
        more = step + 1 < GROUPS * TILES
        next_max = tl.load(row_max_ptr + (step + 1) * TILE + rows, mask=more, other=0.0)
        next_weight = tl.load(row_weight_ptr + (step + 1) * TILE + rows, mask=more, other=0.0)
        keys = _key_tile(k_ptr, keys_ptr, slots, inside, step // TILES, D, ALIGN)
        queries = tl.load(queries_ptr + (step * TILE + rows)[:, None] * D + dims[None, :])
        logits = tl.dot(keys, tl.trans(queries), input_precision="ieee")
        weights = tl.exp2(logits * scale - row_max[None, :]) * row_weight[None, :]
        scores += tl.sum(tl.reshape(weights, [BLOCK, TILE // 8, 8]), 1)
    tl.store(out_ptr + targets, tl.where(inside, tl.sum(scores, 1), 0.0), mask=targets < max_len)


@triton.jit(
    do_not_specialize=["limit", "max_len", "chunks", "shift", "out_row"],
    do_not_specialize_on_alignment=["seq_lens_ptr"],
)
def sum_stored_kernel(
    logits_ptr, seq_lens_ptr, row_max_ptr, row_weight_ptr, out_ptr, limit, max_len, chunks, shift, out_row,
    M: tl.constexpr, PADDED: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum the weights of all rows of a part, from stored logits; PADDED is M rounded up to whole tiles."""
    block, batch, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.minimum(tl.load(seq_lens_ptr + batch).to(tl.int32), limit)
    targets = block * BLOCK + tl.arange(0, BLOCK)
    out_ptr += (part * tl.num_programs(1) + batch) * out_row
    if block * BLOCK >= length:
        tl.store(out_ptr + targets, tl.zeros([BLOCK], tl.float32), mask=targets < max_len)
        return
    positions = targets - shift
    inside = (positions >= 0) & (targets < length)
    first = (batch * tl.num_programs(2) + part) * GROUPS
    scores = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.range(0, GROUPS * M, ROWS, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        real = rows < GROUPS * M
        row_logits = (first * M + rows)[:, None] * chunks * CHUNK
        logits = tl.load(logits_ptr + row_logits + positions[None, :], mask=inside[None, :] & real[:, None], other=0.0)
        row = (first + rows // M) * PADDED + rows % M
        row_max = tl.load(row_max_ptr + row, mask=real, other=0.0)
        row_weight = tl.load(row_weight_ptr + row, mask=real, other=0.0)
        scores += tl.exp2(logits - row_max[:, None]) * row_weight[:, None]
    tl.store(out_ptr + targets, tl.where(inside, tl.sum(scores, 0), 0.0), mask=targets < max_len)
