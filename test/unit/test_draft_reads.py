"""What a sparse draft reads: positions against sets built by hand, lists kept by request slot, the same packed."""

import random

import pytest
import torch

from dustin_kernels import write_draft_lists
from dustin_sglang.config import ConfigError
from dustin_sglang.selection.selector import Selection
from dustin_sglang.sparse_draft import SparseDraft, dense_draft_layers

BUDGET = 12


def draft_reads(
    lists: torch.Tensor, counts: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, width: int
) -> list[list[int]]:
    """Positions that one forward reads of each request, up to `width`, its own tokens aside."""
    bs, k = lists.shape
    positions = torch.arange(100, dtype=torch.int32).repeat(bs, 1)
    ptr, packed = torch.empty((1, bs + 1), dtype=torch.int32), torch.empty((1, bs * width), dtype=torch.int32)
    own = torch.empty((bs, 0), dtype=torch.int64)
    request = torch.arange(bs)
    write_draft_lists(lists, counts, starts, positions, request, ends, own, 0, ptr, packed, max_new=width - k - 1)
    return unpack(ptr[0], packed[0])


def unpack(kv_indptr: torch.Tensor, kv_indices: torch.Tensor) -> list[list[int]]:
    ptr, packed = kv_indptr.tolist(), kv_indices.tolist()
    return [packed[a:b] for a, b in zip(ptr, ptr[1:])]


def listed(seq_len: int, seed: int) -> list[int]:
    """What a policy might choose: everything up to the budget, else any positions in order."""
    return list(range(seq_len)) if seq_len <= BUDGET else sorted(random.Random(seed).sample(range(seq_len), BUDGET))


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_reads_the_shifted_list_and_every_slot_since(seed: int) -> None:
    draw = random.Random(seed)
    starts = [draw.choice([1, 2, BUDGET - 1, BUDGET, BUDGET + 1, draw.randrange(1, 60)]) for _ in range(8)]
    ends = [start + draw.randrange(6) for start in starts]
    chosen = [listed(start, seed * 8 + b) for b, start in enumerate(starts)]
    lists = torch.tensor([own + [-1] * (BUDGET - len(own)) for own in chosen], dtype=torch.int32)
    full = torch.full((8,), BUDGET)
    positions = draft_reads(lists, full, torch.tensor(starts), torch.tensor(ends), BUDGET + 1 + 6)
    for b, (start, end) in enumerate(zip(starts, ends, strict=True)):
        want = {p - 1 for p in chosen[b] if p > 0} | set(range(start - 1, end))
        assert positions[b] == sorted(want)


def test_with_every_position_listed_it_reads_everything() -> None:
    length, end = 30, 34
    everything = torch.arange(length, dtype=torch.int32).unsqueeze(0)
    positions = draft_reads(everything, torch.tensor([length]), torch.tensor([length]), torch.tensor([end]), 40)
    assert positions[0] == list(range(end))


def test_a_request_within_the_budget_reads_everything_whatever_its_row_holds() -> None:
    stale = torch.full((1, BUDGET), 3, dtype=torch.int32)
    length = torch.tensor([BUDGET])
    positions = draft_reads(stale, length - 3, length, length + 4, BUDGET + 5)
    assert positions[0] == list(range(BUDGET + 4))


def table(slots: int = 4, width: int = 64) -> torch.Tensor:
    rows = 1000 * torch.arange(slots, dtype=torch.int32).unsqueeze(1) + torch.arange(width, dtype=torch.int32)
    rows[0] = 0  # SGLang's reserved slot
    return rows


def reads(draft: SparseDraft, slots: list[int], ends: list[int]) -> list[list[int]]:
    (lists,) = draft.lists(torch.tensor(slots), torch.tensor(ends))
    return unpack(lists.kv_indptr, lists.kv_indices)


def test_lists_follow_their_request_slots_when_requests_change_places() -> None:
    draft = SparseDraft(frozenset(), 3, 4, table())
    positions = torch.tensor([[[0, 5, 19], [0, 7, 29]]], dtype=torch.int32)
    draft.keep(Selection(positions, [3, 3], [True, True]), torch.tensor([1, 2]), torch.tensor([20, 30]))
    assert reads(draft, [2, 1], [31, 20]) == [[2006, 2028, 2029, 2030], [1004, 1018, 1019]]


def test_of_several_groups_the_deepest_ones_list_is_read() -> None:
    draft = SparseDraft(frozenset(), 3, 4, table())
    positions = torch.tensor([[[0, 3, 19]], [[0, 5, 19]]], dtype=torch.int32)
    draft.keep(Selection(positions, [3], [True]), torch.tensor([1]), torch.tensor([20]))
    assert reads(draft, [1], [20]) == [[1004, 1018, 1019]]


def test_a_list_that_ended_early_is_read_up_to_its_end() -> None:
    draft = SparseDraft(frozenset(), 3, 4, table())
    ended = Selection(torch.tensor([[[0, 19, -1]]], dtype=torch.int32), [3], [True], kept=torch.tensor([2]))
    draft.keep(ended, torch.tensor([1]), torch.tensor([20]))
    assert reads(draft, [1], [22]) == [[1018, 1019, 1020, 1021]]


def test_a_new_request_in_a_slot_has_the_list_of_its_own_prefill() -> None:
    draft = SparseDraft(frozenset(), 3, 4, table())
    draft.keep(
        Selection(torch.tensor([[[0, 5, 19]]], dtype=torch.int32), [3], [True]), torch.tensor([1]), torch.tensor([20])
    )
    draft.keep(Selection(None, [2], [False]), torch.tensor([1]), torch.tensor([2]))
    assert reads(draft, [1], [3]) == [[1000, 1001, 1002]]


def test_padded_rows_of_a_captured_batch_read_the_dummy_slot() -> None:
    draft = SparseDraft(frozenset(), 3, 4, table())
    draft.keep(
        Selection(torch.tensor([[[0, 5, 19]]], dtype=torch.int32), [3], [True]), torch.tensor([1]), torch.tensor([20])
    )
    assert reads(draft, [1, 0], [20, 1])[1] == [0]


def test_positions_at_the_end_of_the_table_do_not_leave_it() -> None:
    draft = SparseDraft(frozenset(), 3, 4, table(width=20))
    draft.keep(
        Selection(torch.tensor([[[0, 5, 17]]], dtype=torch.int32), [3], [True]), torch.tensor([1]), torch.tensor([18])
    )
    assert reads(draft, [1], [20]) == [[1004, 1016, 1017, 1018, 1019]]


@pytest.mark.parametrize("branches", [1, 2])
def test_packed_lists_are_the_same_reads_and_each_forwards_own_slots(branches: int) -> None:
    draft = SparseDraft(frozenset(), 3, 4, table())
    positions = torch.tensor([[[0, 5, 19], [2, 7, 29]]], dtype=torch.int32)
    draft.keep(Selection(positions, [3, 3], [True, True]), torch.tensor([1, 2]), torch.tensor([20, 30]))
    slots, ends = [2, 1, 3], [31, 24, 2]
    own = 100 + torch.arange(3 * branches * 2).view(3 * branches, 2)
    forwards = draft.lists(torch.tensor(slots), torch.tensor(ends), own)
    alone = draft.lists(torch.tensor(slots), torch.tensor(ends))
    assert [len(forwards), len(alone)] == [2, 1]
    for i, listed in enumerate([*forwards, *alone]):
        rows = unpack(listed.kv_indptr, listed.kv_indices)
        assert max(map(len, rows)) <= listed.max_kv_len
        if i < 2:
            want = [reads(draft, slots, ends)[row // branches] + own[row, : i + 1].tolist() for row in range(len(own))]
            assert rows == want
        else:
            assert rows == reads(draft, slots, ends)


def test_packed_lists_are_written_over_those_of_a_captured_forward() -> None:
    draft = SparseDraft(frozenset(), 3, 4, table())
    captured = draft.lists(torch.tensor([1, 2]), torch.tensor([1, 1]))[0]
    positions = torch.tensor([[[0, 5, 19]]], dtype=torch.int32)
    draft.keep(Selection(positions, [3], [True]), torch.tensor([1]), torch.tensor([20]))
    draft.lists(torch.tensor([1, 0]), torch.tensor([21, 1]), into=captured)
    assert captured.kv_indptr.tolist() == [0, 4, 5]
    assert captured.kv_indices[:5].tolist() == [1004, 1018, 1019, 1020, 0]


def test_unscored_leaves_the_scoring_layers_dense_and_all_none() -> None:
    assert dense_draft_layers("all", 4, (2, 3)) == frozenset()
    assert dense_draft_layers("unscored", 4, (2, 3)) == {2, 3}


def test_unscored_is_refused_where_every_layer_scores() -> None:
    with pytest.raises(ConfigError, match="--dustin-sparse-draft.*'unscored'.*use 'all' or 'off'"):
        dense_draft_layers("unscored", 1, (0,))
