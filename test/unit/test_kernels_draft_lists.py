"""write_draft_lists: lists by hand and against sets, packed for several forwards, and that nothing else is written."""

import os
import random

import pytest
import torch

from dustin_kernels import draft_lists, write_draft_lists

BACKENDS = [
    "reference",
    pytest.param(
        "triton",
        marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    ),
]
POISON = -999


def table(slots, width):
    return 1000 * torch.arange(slots, dtype=torch.int32)[:, None] + torch.arange(width, dtype=torch.int32)


def write(lists, counts, starts, pool, ends, own, own_first, forwards, width=64, max_new=6, backend="auto", spare=5):
    """Rows of every forward, in Python lists; checks that the rest keeps its poison."""
    k, rows = lists.shape[1], len(own)
    indptr = torch.full((forwards, rows + 1), POISON, dtype=torch.int32)
    indices = torch.full((forwards, rows * (k + 1 + max_new + own.shape[1]) + spare), POISON, dtype=torch.int32)
    write_draft_lists(
        lists, torch.tensor(counts), torch.tensor(starts), table(len(lists), width), torch.tensor(pool),
        torch.tensor(ends), own, own_first, indptr, indices, max_new=max_new, backend=backend,
    )  # fmt: skip
    for ptr, packed in zip(indptr.tolist(), indices.tolist()):
        assert ptr[0] == 0 and set(packed[ptr[-1] :]) <= {POISON}
    return [[packed[a:b] for a, b in zip(ptr, ptr[1:])] for ptr, packed in zip(indptr.tolist(), indices.tolist())]


@pytest.mark.parametrize("backend", BACKENDS)
def test_hand_computed(backend):
    lists = torch.tensor([[0, 0, 0], [0, 5, 19], [2, 7, 29]], dtype=torch.int32)
    own = torch.tensor([[7, 8], [9, 10]])
    first, second = write(lists, [3, 3, 3], [1, 20, 30], [2, 1], [31, 20], own, 1, 2, backend=backend)
    # Slot 2: positions 2, 7 and 29 are draft slots 1, 6 and 28; since then 29 and 30. Position 0 has no draft slot.
    assert first == [[2001, 2006, 2028, 2029, 2030, 7], [1004, 1018, 1019, 9]]
    assert second == [[2001, 2006, 2028, 2029, 2030, 7, 8], [1004, 1018, 1019, 9, 10]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_context_within_the_list_is_read_whole_whatever_its_row_holds(backend):
    stale = torch.tensor([[3, 3, 3, 3]] * 2, dtype=torch.int32)
    own = torch.zeros((1, 0), dtype=torch.int64)
    assert write(stale, [4, 1], [1, 4], [1], [6], own, 0, 1, backend=backend) == [[[1000 + i for i in range(6)]]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_padded_row_reads_the_first_slot_and_its_own(backend):
    lists = torch.tensor([[0, 5, 19], [0, 5, 19]], dtype=torch.int32)
    (rows,) = write(lists, [3, 3], [1, 20], [1, 0, 0], [21, 1, 1], torch.tensor([[7], [0], [0]]), 1, 1, backend=backend)
    assert rows == [[1004, 1018, 1019, 1020, 7], [0, 0], [0, 0]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_beyond_the_table_read_its_last_slot(backend):
    lists = torch.tensor([[0, 5, 17]] * 2, dtype=torch.int32)
    own = torch.zeros((1, 0), dtype=torch.int64)
    rows = write(lists, [3, 3], [18, 18], [1], [22], own, 0, 1, width=20, backend=backend)
    assert rows == [[[1004, 1016, 1017, 1018, 1019, 1019, 1019]]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("branches, forwards, own_first, own_slots", [(1, 1, 0, 0), (1, 3, 1, 3), (4, 2, 1, 5)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_random_lists(backend, branches, forwards, own_first, own_slots, dtype, monkeypatch):
    monkeypatch.setattr(draft_lists, "_BLOCK", 16)
    draw, k, bs, width = random.Random(branches * 7 + own_slots), 23, 5, 200
    starts = [1, *(draw.choice([1, k, k + 1, draw.randrange(1, width - 8)]) for _ in range(7))]
    counts = [draw.choice([k, draw.randrange(1, k)]) for _ in starts]
    chosen = [sorted(draw.sample(range(max(n, k)), k)) for n in starts]
    pool = draw.sample(range(8), bs)
    ends = [starts[slot] + draw.randrange(7) for slot in pool]
    own = torch.tensor([[draw.randrange(10**6) for _ in range(own_slots)] for _ in range(bs * branches)], dtype=dtype)
    indptr = torch.empty((forwards, bs * branches + 1), dtype=torch.int32)
    indices = torch.full((forwards, bs * branches * (k + 7 + own_slots)), POISON, dtype=torch.int32)
    write_draft_lists(
        torch.tensor(chosen, dtype=torch.int32), torch.tensor(counts), torch.tensor(starts), table(8, width),
        torch.tensor(pool, dtype=dtype), torch.tensor(ends, dtype=dtype), own.view(bs * branches, own_slots), own_first,
        indptr, indices, max_new=6, backend=backend,
    )  # fmt: skip
    for forward in range(forwards):
        for row in range(bs * branches):
            slot, end = pool[row // branches], ends[row // branches]
            start = starts[slot]
            listed = range(start - 1) if start <= k else [p - 1 for p in chosen[slot][: counts[slot]] if p > 0]
            # A list may hold the last position, whose draft slot is among those since: real ones come from a context
            # that ends there, so what the set below loses is never read twice.
            want = [1000 * slot + p for p in [*listed, *range(start - 1, end)]]
            want += own[row, : own_first + forward].tolist()
            a, b = indptr[forward, row : row + 2].tolist()
            assert indices[forward, a:b].tolist() == want
        assert set(indices[forward, int(indptr[forward, -1]) :].tolist()) <= {POISON}


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_requests(backend):
    lists, own = torch.zeros((2, 3), dtype=torch.int32), torch.zeros((0, 2), dtype=torch.int64)
    indptr, indices = torch.zeros((2, 1), dtype=torch.int32), torch.full((2, 4), POISON, dtype=torch.int32)
    ones, none = torch.ones(2, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    write_draft_lists(
        lists, ones, ones, table(2, 9), none, none, own, 1, indptr, indices, max_new=3, backend=backend
    )  # fmt: skip
    assert indptr.tolist() == [[0], [0]] and set(indices.flatten().tolist()) == {POISON}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(lists=torch.zeros(2, 3)), "lists is torch.float32"),
        (dict(starts=torch.ones(3, dtype=torch.int64)), r"starts has shape \(3,\); it must be \[2\]"),
        (dict(own=torch.zeros((3, 2), dtype=torch.int64)), "own has 3 rows; it must have a multiple of the 2 requests"),
        (dict(own_first=2), "forwards read 2 own slots and up to 1 more; there are 2"),
        (dict(kv_indptr=torch.zeros(2, 2, dtype=torch.int32)), r"kv_indptr has shape \(2, 2\)"),
        (dict(kv_indices=torch.zeros(2, 15, dtype=torch.int32)), "has room for 15 slots a forward; it must have 2 . 8"),
    ],
)
def test_bad_arguments(change, message):
    arguments = dict(
        lists=torch.zeros(2, 3, dtype=torch.int32), counts=torch.ones(2, dtype=torch.int64),
        starts=torch.ones(2, dtype=torch.int64), req_to_token=table(2, 9),
        req_pool_indices=torch.zeros(2, dtype=torch.int64), ends=torch.ones(2, dtype=torch.int64),
        own=torch.zeros((2, 2), dtype=torch.int64), own_first=1, kv_indptr=torch.zeros(2, 3, dtype=torch.int32),
        kv_indices=torch.zeros(2, 16, dtype=torch.int32), max_new=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        write_draft_lists(**{**arguments, **change})
