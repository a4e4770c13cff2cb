"""The search finds the heads that it should in cases made so that one can see which these are."""

from __future__ import annotations

import torch

from dustin_sglang.calibrate.mass import ListSize
from dustin_sglang.calibrate.objective import Mass
from dustin_sglang.calibrate.search import (
    add_greedily,
    by_kv_head,
    by_rank,
    choose_share,
    heads_of,
    layer_values,
    score,
)
from dustin_sglang.calibrate.windows import Window
from dustin_sglang.profile import ModelShape
from dustin_sglang.selection.heads import Heads

SHAPE = ModelShape(layers=2, heads=4, kv_heads=2, head_dim=8)
SIZE = ListSize(budget=6, sinks=1, window=1)  # four of the positions 1..10 of twelve
UNITS = [(layer, head) for layer in range(2) for head in range(2)]


def at(*positions: int) -> torch.Tensor:
    """A score ``[12]`` of 1 at some positions; the others are ranked from the left, far below."""
    return torch.linspace(0.01, 0, 12).index_fill(0, torch.tensor(positions), 1.0)


def window(lookahead: list[torch.Tensor], history: list[torch.Tensor], oracle: torch.Tensor) -> Window:
    """A window of two layers with two KV heads each, whose scores the first of two query heads has."""
    both = [torch.stack(part).view(2, 2, 12) for part in (lookahead, history)]
    scores = [torch.stack([part, 0 * part], 2).flatten(1, 2).half() for part in both]
    attention = torch.stack([oracle, torch.zeros(12)])
    return Window(attention, *scores, torch.zeros(2, 4), torch.zeros(2, 4))


# What matters is at 7 to 10. KV head (0, 1) of the draft knows 7 and 8, (1, 0) knows 9, (1, 1) the same as (0, 1) but
# with a wrong position that it prefers; (0, 0) is always wrong.
LOOKAHEAD = [at(1, 2), at(7, 8), at(9) * 3, at(7, 8) + 2 * at(3)]
HISTORY = [at(1), at(2), at(7, 8, 9), at(10)]
WINDOWS = [window(LOOKAHEAD, HISTORY, (at(7, 8, 9, 10) == 1).float())] * 2
OBJECTIVE = Mass(WINDOWS, SIZE)


def test_the_layer_that_knows_most_is_the_best() -> None:
    values = layer_values(OBJECTIVE, [w.history for w in WINDOWS])
    assert values.argmax() == 1 and values[1] == 1 and values[0] <= 0.5


def test_a_group_is_judged_by_the_attention_of_its_own_layers() -> None:
    attention = torch.stack([at(2, 3, 4, 5) == 1, at(7, 8, 9, 10) == 1]).float()
    windows = [Window(attention, *[torch.zeros(2, 4, 12).half()] * 2, torch.zeros(2, 4), torch.zeros(2, 4))]
    scores = torch.stack([at(2, 3), at(7, 8, 9)])
    values = [Mass(windows, SIZE, range(layer, layer + 1)).of_scores(0, scores) for layer in (0, 1)]
    assert values[0].argmax() == 0 and values[1].argmax() == 1


def test_greedy_adds_what_complements_and_stops_when_nothing_helps() -> None:
    scores = [by_kv_head(w.lookahead, SHAPE) for w in WINDOWS]
    steps = add_greedily(OBJECTIVE, scores, UNITS, most=4)
    assert [step.unit for step in steps] == [(0, 1), (1, 0)]
    assert [step.value for step in steps] == [0.5, 0.75]
    assert [step.unit for step in add_greedily(OBJECTIVE, scores, UNITS, most=1)] == [(0, 1)]


def test_a_kv_head_brings_all_its_query_heads() -> None:
    assert heads_of([(1, 0), (0, 1), (1, 1)], SHAPE) == Heads(((0, (2, 3)), (1, (0, 1, 2, 3))))


def test_scores_of_heads_are_weighed() -> None:
    heads = ((0, (2, 3)), (1, (0,)))
    total = score(WINDOWS[0].lookahead, Heads(heads))
    torch.testing.assert_close(total, at(7, 8) + 3 * at(9), atol=1e-3, rtol=1e-3)
    total = score(WINDOWS[0].lookahead, Heads(heads, (2.0, 5.0, 0.5)))
    torch.testing.assert_close(total, 2 * at(7, 8) + 1.5 * at(9), atol=1e-3, rtol=1e-3)


def test_ranks_choose_the_best_query_head_of_each_kv_head() -> None:
    ranks = torch.tensor([[0.1, 0.9, 0.2, 0.2], [0.3, 0.3, 0.8, 0.0]])
    assert by_rank(ranks, SHAPE, UNITS, most=3) == [(0, 0), (1, 1), (1, 0)]


def test_optuna_finds_the_split_and_the_seed_decides() -> None:
    # Lookahead is right about two positions and then wrong, history about the other two.
    ahead = [at(7, 8) * 2 + at(1, 2)] * 2
    back = [at(9, 10) * 2 + at(3, 4)] * 2
    share, value = choose_share(OBJECTIVE, ahead, back, SIZE, trials=20, seed=1)
    assert round(share * SIZE.free) == 2 and value == 1
    assert choose_share(OBJECTIVE, ahead, back, SIZE, trials=20, seed=1) == (share, value)
