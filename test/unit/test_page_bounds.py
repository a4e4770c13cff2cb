"""Page bounds: a case by hand, and that no key of a page gets more than its bound."""

from __future__ import annotations

import math

import torch

from dustin_sglang.selection.context import Context
from dustin_sglang.selection.heads import Heads
from dustin_sglang.selection.page_bounds import PAGE, PageBounds
from dustin_sglang.selection.state import QueryStore


def bounds(
    query: torch.Tensor, keys: torch.Tensor, length: int, weights: tuple[float, ...] | None = None
) -> torch.Tensor:
    """Scores of one request whose position j is at slot 2 j; `query` ``[heads, dim]``, `keys` ``[tokens, 1, dim]``."""
    heads, dim = query.shape
    store = QueryStore(
        Heads(((0, tuple(range(heads))),), weights), heads, dim, num_slots=2, max_batch=1, pending_rows=1,
        dtype=torch.float32, device="cpu",
    )  # fmt: skip
    store.kept[1] = query
    pool = torch.full((2 * len(keys), 1, dim), float("nan"))
    pool[::2] = keys
    table = torch.zeros(2, len(keys), dtype=torch.int32)
    table[1] = torch.arange(0, 2 * len(keys), 2)
    signal = PageBounds(store, [pool], (0,) * heads, 1.0, shift=0)
    return signal.score(Context(table, torch.tensor([1]), torch.tensor([length]), length))[0, 0]


def test_every_position_has_the_bound_of_its_page() -> None:
    keys = torch.zeros(2 * PAGE, 1, 2)
    keys[3, 0] = torch.tensor([1.0, 0])
    keys[5, 0] = torch.tensor([0, -2.0])
    keys[PAGE, 0] = torch.tensor([2.5, 0.0])
    # Bounds: 1 + 2 of the first page, though no key of it has more than 2; 2.5 of the second.
    scores = bounds(torch.tensor([[1.0, -1.0]]), keys, 2 * PAGE)
    first = math.exp(3) / (math.exp(3) + math.exp(2.5))
    torch.testing.assert_close(scores[:PAGE], torch.full((PAGE,), first))
    torch.testing.assert_close(scores[PAGE:], torch.full((PAGE,), 1 - first))


def test_positions_beyond_the_length_neither_count_nor_score() -> None:
    keys = torch.zeros(2 * PAGE, 1, 2)
    keys[PAGE + 1] = 100.0
    scores = bounds(torch.ones(1, 2), keys, PAGE + 1)
    torch.testing.assert_close(scores, torch.full((PAGE + 1,), 0.5))


def test_heads_are_summed_as_shares() -> None:
    torch.manual_seed(0)
    keys, query = torch.randn(5 * PAGE, 1, 8), torch.randn(3, 8)
    both = bounds(query, keys, 5 * PAGE)
    one_by_one = sum(bounds(head.unsqueeze(0), keys, 5 * PAGE) for head in query)
    torch.testing.assert_close(both, one_by_one)
    torch.testing.assert_close(both[::PAGE].sum(), torch.tensor(3.0))
    weighted = bounds(query[:2], keys, 5 * PAGE, (2.0, 0.5))
    expected = 2 * bounds(query[:1], keys, 5 * PAGE) + bounds(query[1:2], keys, 5 * PAGE) / 2
    torch.testing.assert_close(weighted, expected)


def test_no_key_gets_more_than_the_bound_of_its_page() -> None:
    torch.manual_seed(0)
    keys, query = torch.randn(4 * PAGE, 1, 8), torch.randn(1, 8)
    logits = bounds(query, keys, 4 * PAGE)[::PAGE].log()
    attention = (keys[:, 0] @ query[0]).view(4, PAGE).amax(1)
    # Softmax leaves bounds known up to a constant: differences between pages are bounded by it as well.
    exact_bounds = torch.maximum(keys.view(4, PAGE, 8).amin(1) * query, keys.view(4, PAGE, 8).amax(1) * query).sum(1)
    torch.testing.assert_close(logits - logits[0], exact_bounds - exact_bounds[0])
    assert (exact_bounds >= attention).all()
