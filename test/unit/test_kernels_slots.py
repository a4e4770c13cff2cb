"""write_slots: what is written, and that nothing else is."""

import os

import pytest
import torch

from dustin_kernels import slots, write_slots

BACKENDS = [
    "reference",
    pytest.param(
        "triton",
        marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    ),
]
POISON = -999


def expected(positions, seq_lens, req_pool_indices, req_to_token, kv_indptr, num_draft_tokens, size):
    """Plain Python."""
    result = [POISON] * size
    for b, n in enumerate(seq_lens):
        room = kv_indptr[b + 1] - kv_indptr[b]
        count = max(min(n, room - num_draft_tokens, n if positions is None else len(positions[b])), 0)
        listed = range(count) if positions is None else positions[b][:count]
        read = [*listed, *range(n, n + num_draft_tokens)][:room]
        for i, position in enumerate(read):
            result[kv_indptr[b] + i] = req_to_token[req_pool_indices[b]][position]
    return result


@pytest.mark.parametrize("backend", BACKENDS)
def test_hand_computed(backend):
    req_to_token = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]], dtype=torch.int32)
    positions = torch.tensor([[0, 2, 3], [0, -1, -1]], dtype=torch.int32)
    kv_indices = torch.full((10,), POISON, dtype=torch.int32)
    write_slots(
        positions, torch.tensor([4, 1]), torch.tensor([1, 0]), req_to_token,
        torch.tensor([1, 6, 9], dtype=torch.int32), 2, kv_indices, backend=backend,
    )  # fmt: skip
    assert kv_indices.tolist() == [POISON, 20, 22, 23, 24, 25, 10, 11, 12, POISON]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_shorter_range_lists_fewer_positions_and_all_drafts(backend):
    req_to_token = torch.arange(100, 120, dtype=torch.int32).view(2, 10)
    positions = torch.tensor([[0, 2, 3, -1], [1, 3, 5, 6]], dtype=torch.int32)
    kv_indices = torch.full((9,), POISON, dtype=torch.int32)
    write_slots(
        positions, torch.tensor([5, 8]), torch.tensor([0, 1]), req_to_token,
        torch.tensor([0, 5, 8], dtype=torch.int32), 2, kv_indices, backend=backend,
    )  # fmt: skip
    assert kv_indices.tolist() == [100, 102, 103, 105, 106, 111, 118, 119, POISON]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("listed", [1, 15, 16, 17, 40, None])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_random_lists(backend, listed, dtype, monkeypatch):
    monkeypatch.setattr(slots, "_BLOCK", 16)
    generator = torch.Generator().manual_seed(listed or 0)
    seq_lens, drafts, width = [0, 1, 15, 16, 17, 60], 4, 64
    req_to_token = torch.randint(10**6, (9, width + 5), generator=generator, dtype=torch.int32)[:, :width]
    req_pool_indices = torch.randperm(9, generator=generator)[:6]
    positions = None
    if listed is not None:
        positions = torch.full((6, listed + 3), -1, dtype=torch.int32)[:, :listed]
        for b, n in enumerate(seq_lens):
            chosen = torch.randperm(n, generator=generator)[:listed].sort().values
            positions[b, : len(chosen)] = chosen.int()
    counts = [min(n, listed if listed is not None else n) + drafts for n in seq_lens]
    kv_indptr = torch.tensor([3, *counts], dtype=torch.int32).cumsum(0).int()
    kv_indices = torch.full((int(kv_indptr[-1]) + 7,), POISON, dtype=torch.int32)
    write_slots(
        positions, torch.tensor(seq_lens, dtype=dtype), req_pool_indices.to(dtype), req_to_token, kv_indptr, drafts,
        kv_indices, max_len=70, backend=backend,
    )  # fmt: skip
    assert kv_indices.tolist() == expected(
        None if positions is None else positions.tolist(), seq_lens, req_pool_indices.tolist(), req_to_token.tolist(),
        kv_indptr.tolist(), drafts, len(kv_indices),
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("listed", [True, False])
def test_padded_rows_write_nothing(backend, listed):
    """A padded row of a CUDA graph has length 0 or 1, request 0 and an empty range at the end."""
    kv_indices = torch.full((9,), POISON, dtype=torch.int32)
    req_to_token = torch.arange(20, dtype=torch.int32).view(2, 10)
    write_slots(
        torch.zeros(3, 4, dtype=torch.int32) if listed else None, torch.tensor([1, 1, 0]), torch.tensor([1, 0, 0]),
        req_to_token, torch.tensor([0, 3, 3, 3], dtype=torch.int32), 2, kv_indices, max_len=4, backend=backend,
    )  # fmt: skip
    assert kv_indices.tolist() == [10, 11, 12] + [POISON] * 6


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_drafts_and_no_requests(backend):
    kv_indices = torch.full((3,), POISON, dtype=torch.int32)
    req_to_token = torch.arange(4, dtype=torch.int32)[None]
    one = torch.ones(1, dtype=torch.int64)
    indptr = torch.tensor([0, 1], dtype=torch.int32)
    write_slots(None, one, one * 0, req_to_token, indptr, 0, kv_indices, max_len=1, backend=backend)
    assert kv_indices.tolist() == [0, POISON, POISON]
    write_slots(None, one[:0], one[:0], req_to_token, indptr[:1], 2, kv_indices, max_len=1, backend=backend)
    assert kv_indices.tolist() == [0, POISON, POISON]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(positions=None), "max_len is None"),
        (dict(positions=torch.zeros(2, 4)), "positions is torch.float32"),
        (dict(num_draft_tokens=-1), "num_draft_tokens is -1"),
        (dict(kv_indptr=torch.zeros(2, dtype=torch.int32)), r"kv_indptr has shape \(2,\); it must be \[3\]"),
        (dict(kv_indices=torch.zeros(9, dtype=torch.int64)), "kv_indices is torch.int64"),
    ],
)
def test_bad_arguments(change, message):
    arguments = dict(
        positions=torch.zeros(2, 4, dtype=torch.int32), seq_lens=torch.ones(2, dtype=torch.int64),
        req_pool_indices=torch.zeros(2, dtype=torch.int64), req_to_token=torch.zeros(2, 9, dtype=torch.int32),
        kv_indptr=torch.zeros(3, dtype=torch.int32), num_draft_tokens=2, kv_indices=torch.zeros(9, dtype=torch.int32),
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        write_slots(**{**arguments, **change})
