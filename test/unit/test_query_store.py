"""The queries of the scoring heads: what is recorded, kept and handed to scoring."""

import torch

from dustin_sglang.selection.heads import Heads
from dustin_sglang.selection.state import QueryStore

HEADS = Heads(((1, (0, 2)), (3, (1,))))


def store(**kwargs: int) -> QueryStore:
    return QueryStore(
        HEADS,
        3,
        4,
        num_slots=6,
        max_batch=3,
        pending_rows=kwargs.pop("pending_rows", 2),
        dtype=torch.float32,
        device="cpu",
        **kwargs,
    )


def test_heads_know_their_places() -> None:
    assert HEADS.count == 3 and HEADS.layers == (1, 3)
    assert HEADS.offsets == {1: (0, 2), 3: (2, 3)}
    assert HEADS.layer_index == (0, 0, 1)
    assert Heads(((0, (0, 3, 5)),)).kv_heads(6, 2) == (0, 1, 1)


def test_a_rank_holds_its_own_heads_in_its_own_numbers() -> None:
    heads = Heads(((1, (0, 2, 5)), (3, (1,))))
    assert heads.shard(0, 2, 6) == Heads(((1, (0, 2)), (3, (1,))))
    assert heads.shard(1, 2, 6) == Heads(((1, (2,)),))


def test_a_kept_row_belongs_to_its_request_slot() -> None:
    kept = store()
    q = torch.arange(2 * 3 * 4.0).view(2, 3, 4)
    kept.keep(1, q, torch.tensor([4, 2]))
    kept.keep(3, q + 100, torch.tensor([4, 2]))
    kept.keep(0, q, torch.tensor([4, 2]))  # a layer that does not score
    queries = kept.queries(torch.tensor([2, 4]))
    assert queries.shape == (2, 1, 3, 4)
    assert torch.equal(queries[1, 0], torch.stack([q[0, 0], q[0, 2], q[0, 1] + 100]))
    assert torch.equal(queries[0, 0], torch.stack([q[1, 0], q[1, 2], q[1, 1] + 100]))


def test_acceptance_says_which_pending_row_is_kept() -> None:
    verified = store()
    q = torch.randn(4, 3, 4)  # two requests, two rows each
    verified.write_pending(1, q)
    verified.write_pending(3, q)
    verified.keep_pending(torch.tensor([1, 2]), torch.tensor([5, 3]))
    queries = verified.queries(torch.tensor([5, 3]))
    assert torch.equal(queries[0, 0], q[1, [0, 2, 1]])
    assert torch.equal(queries[1, 0], q[2, [0, 2, 1]])


def test_ahead_rows_are_grouped_by_request_with_the_kept_row_last() -> None:
    draft = store(steps=2, branches=2)
    q = [torch.randn(4, 3, 4) for _ in range(2)]  # two requests x two branches, in each of two steps
    for step in range(2):
        draft.write_ahead(step, 1, q[step])
        draft.write_ahead(step, 3, q[step])
    draft.keep(1, q[0][:2], torch.tensor([0, 1]))
    queries = draft.queries(torch.tensor([0, 1]))
    assert queries.shape == (2, 5, 3, 4)
    # Request 1: branches 2 and 3 of step 0, then of step 1.
    expected = torch.stack([q[0][2], q[0][3], q[1][2], q[1][3]])[:, [0, 2, 1]]
    assert torch.equal(queries[1, :4], expected)
    assert torch.equal(queries[1, 4, :2], q[0][1, [0, 2]])


def test_before_a_round_has_drafted_only_the_kept_row_speaks() -> None:
    draft = store(steps=2, branches=2)
    q = torch.randn(4, 3, 4)
    draft.write_ahead(0, 1, q)  # another batch's round
    draft.keep(1, q[:2], torch.tensor([0, 1]))
    queries = draft.queries(torch.tensor([1]), drafted=False)
    assert queries.shape == (1, 1, 3, 4)
    assert torch.equal(queries[0, 0, :2], q[1, [0, 2]])


def test_a_forward_that_ended_early_leaves_nothing_to_the_next() -> None:
    draft = store(steps=1)
    lost, q = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    draft.write_ahead(0, 1, lost)
    draft.write_ahead(0, 1, q)
    draft.write_ahead(0, 3, q)
    assert torch.equal(draft.queries(torch.tensor([0, 1]))[:, 0], q[:, [0, 2, 1]])


def test_queries_are_copied_from_a_part_of_wider_rows() -> None:
    # As a model gives them: the first columns of a product that holds keys and values too.
    draft, rows = store(steps=1), torch.randn(2, 2, 20)
    for layer, row in zip((1, 3), rows.transpose(0, 1)):
        draft.write_ahead(0, layer, row[:, :12].view(2, 3, 4))
    expected = torch.cat([rows[:, 0, :12].view(2, 3, 4)[:, [0, 2]], rows[:, 1, :12].view(2, 3, 4)[:, [1]]], dim=1)
    assert torch.equal(draft.queries(torch.tensor([0, 1]))[:, 0], expected)
