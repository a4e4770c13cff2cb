"""The stand-in for sgl_kernel: hand-computed cases, then SGLang's own Triton kernels in the interpreter."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

from dustin_sglang.cpu import SHIMS

if str(SHIMS) not in sys.path:
    # A GPU session has the real sgl_kernel, which must not be shadowed.
    pytest.skip("needs SGLang's CPU engine", allow_module_level=True)
import sgl_kernel

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

# Two root children and one child of each (node numbers): 0 -> 1 -> 3 and 0 -> 2 -> 4.
PARENT_LIST = torch.tensor([[-1, 0, 1]])
SELECTED = torch.tensor([[0, 1, 2, 5]])
MASK = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]


def slots_table() -> torch.Tensor:
    """``req_to_token`` of 3 requests and 10 positions; slot = 100 * request + position."""
    return (100 * torch.arange(3)[:, None] + torch.arange(10)).int()


def tree_buffers(bs: int, n: int, mask_size: int) -> list[torch.Tensor]:
    """Buffers as SGLang hands them over: mask, positions, retrieve_index, next_token, next_sibling."""
    links = torch.full((3, bs, n), -1)
    return [
        torch.ones(mask_size, dtype=torch.bool),
        torch.empty(bs * n, dtype=torch.int64),
        *(x.clone() for x in links),
    ]


def verify_buffers(bs: int, n: int, depth: int) -> list[torch.Tensor]:
    """predicts, accept_index, accept_token_num."""
    accept_index = torch.full((bs, depth), -1, dtype=torch.int32)
    return [torch.zeros(bs * n, dtype=torch.int32), accept_index, torch.empty(bs, dtype=torch.int32)]


def test_slots_are_assigned_and_read_back_request_by_request() -> None:
    table = slots_table()
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([4, 6])
    sgl_kernel.assign_req_to_token_pool_cpu(rows, table, start, end, torch.tensor([7, 8, 9, 5, 6]), 10)
    assert table[2].tolist() == [200, 7, 8, 9, 204, 205, 206, 207, 208, 209]
    assert table[0].tolist() == [0, 1, 2, 3, 5, 6, 6, 7, 8, 9]
    assert table[1].tolist() == list(range(100, 110))

    out = torch.full((7,), -1)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, table, start, end, out, 10)
    assert out.tolist() == [7, 8, 9, 5, 6, -1, -1]


def test_an_empty_range_takes_no_slots() -> None:
    out = torch.full((2,), -1)
    start, end = torch.tensor([3, 2, 5]), torch.tensor([3, 4, 5])
    sgl_kernel.assign_extend_cache_locs_cpu(torch.tensor([0, 1, 2]), slots_table(), start, end, out, 10)
    assert out.tolist() == [102, 103]


def test_draft_slots_follow_the_committed_tokens() -> None:
    out = torch.empty(2 * 2 * 3, dtype=torch.int64)
    rows, seq_lens = torch.tensor([1, 0]), torch.tensor([4, 2])
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(rows, slots_table(), seq_lens, out, 10, 2, 3)
    assert out.tolist() == [104, 105, 106, 107, 108, 109, 2, 3, 4, 5, 6, 7]


def test_every_branch_gets_its_own_drafts_after_the_context() -> None:
    rows, seq_lens = torch.tensor([1, 0]), torch.tensor([4, 2])
    table = sgl_kernel.build_draft_decode_metadata_cpu(slots_table(), rows, seq_lens, 2, 3, 10)
    assert table.dtype == torch.int32
    assert table[0, :7].tolist() == [100, 101, 102, 103, 104, 105, 106]
    assert table[1, :7].tolist() == [100, 101, 102, 103, 107, 108, 109]
    assert table[2, :5].tolist() == [0, 1, 2, 3, 4]
    assert table[3, :5].tolist() == [0, 1, 5, 6, 7]


def test_kv_rows_move_in_every_buffer_and_are_read_first() -> None:
    buffers = [torch.arange(24.0).view(6, 2, 2), torch.arange(18.0).view(6, 3).bfloat16()]
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    strides = torch.tensor([b[0].numel() * b.element_size() for b in buffers])
    before = [b.clone() for b in buffers]
    target, source = torch.tensor([2, 1]), torch.tensor([4, 2])  # slot 2 is overwritten before it is a source
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    for now, then in zip(buffers, before, strict=True):
        assert torch.equal(now[target], then[source])
        assert torch.equal(now[[0, 3, 4, 5]], then[[0, 3, 4, 5]])


def test_the_bonus_token_is_the_last_accepted_one() -> None:
    out = torch.empty(2, dtype=torch.int32)
    accepted = torch.tensor([[5, 6, 7], [8, 0, 0]], dtype=torch.int32)
    sgl_kernel.fill_bonus_tokens_cpu(accepted, torch.tensor([3, 1], dtype=torch.int32), out, 3)
    assert out.tolist() == [7, 8]


def test_slots_of_rejected_rows_are_dropped() -> None:
    accept_index = torch.tensor([[0, 2, -1], [3, -1, -1]], dtype=torch.int32)
    out = torch.zeros(6, dtype=torch.int64)
    sgl_kernel.fill_accept_out_cache_loc_cpu(accept_index, torch.tensor([40, 41, 42, 43, 44, 45]), out)
    assert out.tolist() == [40, 42, 43, 0, 0, 0]


@pytest.mark.parametrize("select, expected", [(None, [2, 3, 91, 92]), ([1, 3], [2, 91, 3, 92])])
def test_tokens_shift_left_and_take_the_next_one(select: list[int] | None, expected: list[int]) -> None:
    tokens = torch.tensor([1, 2, 3, 9])
    chosen = None if select is None else torch.tensor(select)
    sgl_kernel.rotate_input_ids_cpu(tokens, torch.tensor([0, 3]), torch.tensor([3, 1]), torch.tensor([91, 92]), chosen)
    assert tokens.tolist() == expected


def test_a_tree_is_built_from_its_kept_candidates() -> None:
    mask, positions, index, first_child, next_sibling = buffers = tree_buffers(2, 5, 50)
    parent_list, selected = PARENT_LIST.repeat(2, 1), torch.cat([SELECTED, torch.tensor([[0, 1, 2, 3]])])
    sgl_kernel.build_tree_kernel_efficient_cpu(parent_list, selected, torch.tensor([7, 3]), *buffers, 2, 2, 5, 1)
    assert mask.view(2, 5, 5)[0].int().tolist() == MASK
    assert positions.tolist() == [7, 8, 8, 9, 9, 3, 4, 4, 5, 5]
    assert index.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    # In the second tree node 1 has both children.
    assert first_child.tolist() == [[1, 3, 4, -1, -1], [1, 3, -1, -1, -1]]
    assert next_sibling.tolist() == [[-1, 2, -1, -1, -1], [-1, 2, -1, 4, -1]]


def test_a_full_mask_is_written_behind_each_context_only() -> None:
    buffers = tree_buffers(2, 5, 5 * (2 + 5) + 5 * (1 + 5))
    mask = buffers[0]
    parent_list, selected = PARENT_LIST.repeat(2, 1), SELECTED.repeat(2, 1)
    sgl_kernel.build_tree_kernel_efficient_cpu(parent_list, selected, torch.tensor([2, 1]), *buffers, 2, 2, 5, 0)
    for part, context in ((mask[:35].view(5, 7), 2), (mask[35:].view(5, 6), 1)):
        assert part[:, :context].all()
        assert part[:, context:].int().tolist() == MASK


def test_a_bit_packed_mask_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="bit-packed"):
        sgl_kernel.build_tree_kernel_efficient_cpu(
            PARENT_LIST, SELECTED, torch.tensor([7]), *tree_buffers(1, 5, 25), 2, 2, 5, 2
        )


def test_a_mask_alone_gives_the_same_tree() -> None:
    _, positions, index, first_child, next_sibling = buffers = tree_buffers(1, 5, 25)
    mask = torch.tensor(MASK, dtype=torch.bool).flatten()
    sgl_kernel.reconstruct_indices_from_tree_mask(mask, torch.tensor([7]), *buffers[1:], 1, 5)
    assert positions.tolist() == [7, 8, 8, 9, 9]
    assert index.tolist() == [[0, 1, 2, 3, 4]]
    assert first_child.tolist() == [[1, 3, 4, -1, -1]]
    assert next_sibling.tolist() == [[-1, 2, -1, -1, -1]]


@pytest.mark.parametrize(
    "target, path, tokens",
    [
        ([20, 0, 40, 0, 99], [0, 2, 4], [20, 40, 99]),  # the second root child, then its child
        ([10, 77, 40, 0, 99], [0, 1], [10, 77]),  # node 1's child drafted 30, not 77
        ([50, 30, 40, 0, 0], [0], [50]),  # nobody drafted 50: only the target's own token
    ],
)
def test_verification_follows_the_target(target: list[int], path: list[int], tokens: list[int]) -> None:
    """The tree is the batch's second request, so that row numbers and node numbers differ."""
    buffers = tree_buffers(2, 5, 50)
    parent_list, selected = PARENT_LIST.repeat(2, 1), SELECTED.repeat(2, 1)
    sgl_kernel.build_tree_kernel_efficient_cpu(parent_list, selected, torch.tensor([7, 7]), *buffers, 2, 2, 5, 1)
    predicts, accept_index, accepted = results = verify_buffers(2, 5, 3)
    sgl_kernel.verify_tree_greedy_cpu(
        *results,
        candidates=torch.tensor([[1, 2, 3, 4, 5], [0, 10, 20, 30, 40]]),
        retrive_index=buffers[2],
        retrive_next_token=buffers[3],
        retrive_next_sibling=buffers[4],
        target_predict=torch.tensor([[9, 9, 9, 9, 9], target]),
    )
    assert accepted.tolist() == [0, len(path) - 1]
    rows = [5 + node for node in path]
    assert accept_index[1].tolist() == rows + [-1] * (3 - len(path))
    assert predicts[rows].tolist() == tokens
    assert predicts.count_nonzero() == len(path) + 1  # and the first request's one token


def test_missing_operators_raise_when_called_or_stay_absent() -> None:
    with pytest.raises(NotImplementedError, match="weight_packed_linear_cpu"):
        sgl_kernel.weight_packed_linear_cpu(1, 2)
    with pytest.raises(AttributeError, match="'silu_and_mul'"):
        _ = sgl_kernel.silu_and_mul
    with pytest.raises(ImportError):
        from sgl_kernel import merge_state_v2  # noqa: F401


def random_tree(generator: torch.Generator, bs: int, topk: int, steps: int, n: int) -> Any:
    """Parents, kept candidates and tokens of a round of SGLang's own drafting with random probabilities."""
    from sglang.srt.speculative.eagle_utils import organize_draft_results
    from sglang.srt.speculative.spec_utils import select_top_k_tokens

    scores, parts = None, []
    rows = bs
    for step in range(steps):
        probabilities = torch.rand(rows, topk, generator=generator)
        tokens = torch.randint(0, 4, (rows, topk), generator=generator)
        _, _, scores, part = select_top_k_tokens(step, probabilities, tokens, torch.zeros(rows, 1), scores, topk)
        parts.append(part)
        rows = bs * topk
    return organize_draft_results(*(list(column) for column in zip(*parts, strict=True)), n)


@interpreted
@pytest.mark.parametrize("bs, topk, steps, n", [(2, 1, 3, 4), (2, 2, 3, 6), (1, 4, 2, 12), (3, 3, 4, 9), (1, 2, 1, 3)])
def test_trees_match_sglangs_kernels(bs: int, topk: int, steps: int, n: int) -> None:
    from sglang.srt.speculative.eagle_utils import sgl_build_tree_kernel_triton, verify_tree_greedy_triton

    generator = torch.Generator().manual_seed(n)
    parent_list, selected, tokens = random_tree(generator, bs, topk, steps, n)
    seq_lens = torch.randint(1, 6, (bs,), generator=generator)
    for mode, size in ((0, int(seq_lens.sum()) * n + bs * n * n), (1, bs * n * n)):
        theirs, ours = tree_buffers(bs, n, size), tree_buffers(bs, n, size)
        sgl_build_tree_kernel_triton(parent_list, selected, seq_lens, *theirs, topk, steps, n, mode)
        sgl_kernel.build_tree_kernel_efficient_cpu(parent_list, selected, seq_lens, *ours, topk, steps, n, mode)
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))

    candidates = torch.cat([torch.zeros(bs, 1, dtype=torch.int64), tokens], dim=1)
    links = ours[2:]
    for _ in range(4):
        target = torch.randint(0, 4, (bs, n), generator=generator)
        theirs, ours = verify_buffers(bs, n, steps + 1), verify_buffers(bs, n, steps + 1)
        verify_tree_greedy_triton(*theirs, candidates, *links, target)
        sgl_kernel.verify_tree_greedy_cpu(*ours, candidates, *links, target)
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


@interpreted
def test_slot_tables_match_sglangs_kernels() -> None:
    from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs
    from sglang.srt.mem_cache.allocation import assign_req_to_token_pool

    generator = torch.Generator().manual_seed(0)
    table = torch.randint(0, 1000, (5, 90), generator=generator, dtype=torch.int32)
    rows = torch.tensor([4, 0, 3])
    start = torch.randint(0, 40, (3,), generator=generator)
    end = start + torch.tensor([40, 0, 7])  # more and fewer than one block of the kernel
    theirs, ours = torch.full((50,), -1), torch.full((50,), -1)
    assign_extend_cache_locs[(3,)](rows, table, start, end, theirs, 90, 4)
    sgl_kernel.assign_extend_cache_locs_cpu(rows, table, start, end, ours, 90)
    assert torch.equal(theirs, ours)

    slots = torch.randint(0, 1000, (47,), generator=generator)
    theirs, ours = table.clone(), table.clone()
    assign_req_to_token_pool[(3,)](rows, theirs, start, end, slots, 90, 4)
    sgl_kernel.assign_req_to_token_pool_cpu(rows, ours, start, end, slots, 90)
    assert torch.equal(theirs, ours)
