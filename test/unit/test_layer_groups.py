"""Groups of layers: how layers fall into them, and that each group's list is made by its own history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dustin_sglang.config import ConfigError, DustinConfig
from dustin_sglang.grouping import Grouping, count_groups
from dustin_sglang.profile import (
    GroupWeights,
    ModelShape,
    Profile,
    ProfileError,
    auto_profile,
    load_profile,
    save_profile,
)
from dustin_sglang.selection.context import Context
from dustin_sglang.selection.heads import Heads
from dustin_sglang.selection.layer_groups import LayerGroups
from dustin_sglang.selection.policies import POLICIES
from dustin_sglang.selection.selector import Selector
from dustin_sglang.selection.signals import Signal
from dustin_sglang.selection.state import QueryStore
from dustin_sglang.wiring import Wiring


def test_groups_are_contiguous_and_differ_by_one_layer_at_most() -> None:
    for layers in (1, 4, 7, 30, 80):
        for count in range(1, min(layers, 9) + 1):
            groups = LayerGroups(layers, count)
            assert [layer for group in groups.ranges for layer in group] == list(range(layers))
            sizes = {len(group) for group in groups.ranges}
            assert max(sizes) - min(sizes) <= 1 and min(sizes) > 0
            assert all(layer in groups.ranges[groups.of(layer)] for layer in range(layers))


@pytest.mark.parametrize("count", [0, 5])
def test_there_are_no_more_groups_than_layers(count: int) -> None:
    with pytest.raises(ValueError, match=f"4 layers cannot fall into {count} groups"):
        LayerGroups(4, count)


def test_heads_are_split_by_the_group_of_their_layer() -> None:
    heads = Heads(((1, (0, 2)), (4, (1,)), (5, (3,))))
    parts = LayerGroups(6, 3).split(heads)
    assert [part.by_layer for part in parts] == [((1, (0, 2)),), (), ((4, (1,)), (5, (3,)))]
    assert heads.places(parts) == (slice(0, 2), slice(2, 2), slice(2, 4))


@pytest.mark.parametrize("policy", ["streaming", "random", "dense", "snapkv"])
def test_a_policy_whose_lists_would_not_differ_refuses_groups(policy: str) -> None:
    assert DustinConfig(policy=policy, layer_groups=1).layer_groups == 1
    with pytest.raises(ConfigError, match=f"--dustin-layer-groups .* is 2 with --dustin-policy {policy}: .*use 1"):
        DustinConfig(policy=policy, layer_groups=2)


DIM, LENGTHS = 16, [40, 25]
# By layer, the one position of each request that its query looks at.
LIKES = {1: (7, 9), 3: (20, 3), 5: (30, 11)}


def store_of(heads: Heads, batch: int = len(LENGTHS)) -> QueryStore:
    store = QueryStore(heads, 2, DIM, num_slots=4, max_batch=4, pending_rows=1, dtype=torch.float32, device="cpu")
    store.kept[:batch] = 1.0
    return store


def keys_of(likes: tuple[int, int]) -> torch.Tensor:
    """K pool whose slot is 100 a request plus the position."""
    pool = torch.zeros(200, 1, DIM)
    for request, position in enumerate(likes):
        pool[100 * request + position] = 1.0
    return pool


def batch() -> Context:
    table = torch.arange(200, dtype=torch.int32).view(2, 100)
    return Context(table, torch.tensor([0, 1]), torch.tensor(LENGTHS), max(LENGTHS))


@pytest.mark.parametrize("policy", ["history", "hybrid", "hybrid-sum"])
def test_each_group_lists_what_its_own_layer_looks_at(policy: str) -> None:
    parts = [Heads(((layer, (0, 1)),)) for layer in LIKES]
    heads = Heads(tuple(one for part in parts for one in part.by_layer))
    store = store_of(heads)
    pools = [keys_of(likes) for likes in LIKES.values()]
    history = Signal(store, pools, (0,) * heads.count, 1.0, shift=0, parts=heads.places(parts))
    ahead = Heads(((0, (0, 1)),))
    lookahead = Signal(store_of(ahead), [keys_of((15, 16))], (0, 0), 1.0, shift=0)
    one = POLICIES[policy]()
    selector = Selector(one, one.budget(6, 1, 2, 0.5), lookahead, history, pages=history)
    selection = selector.select(batch(), LENGTHS)
    assert selection.positions is not None and selection.positions.shape == (3, 2, 6)
    assert selection.counts == [6, 6]
    for listed, likes in zip(selection.positions.tolist(), LIKES.values(), strict=True):
        for row, liked, length, ahead_liked in zip(listed, likes, LENGTHS, (15, 16), strict=True):
            assert {0, length - 2, length - 1, liked} <= set(row)
            assert (ahead_liked in row) == (policy != "history")


def test_groups_that_read_unequal_numbers_of_kv_heads_are_scored_alike() -> None:
    """The second of three layers has two KV heads' queries, the others one's: one call cannot score them together."""
    heads, parts = Heads(((1, (0,)), (3, (0, 1)), (5, (1,)))), (slice(0, 1), slice(1, 3), slice(3, 4))
    generator = torch.Generator().manual_seed(0)
    pools = [torch.randn(200, 2, DIM, generator=generator) for _ in range(3)]
    store = store_of(heads)
    store.kept[:2] = torch.randn(2, 4, DIM, generator=generator)
    scores = Signal(store, pools, (0, 0, 1, 1), 1.0, shift=0, parts=parts).score(batch())
    for part, layer, kv_heads, found in zip(parts, range(3), ((0,), (0, 1), (1,)), scores, strict=True):
        alone = store_of(Heads((heads.by_layer[layer],)))
        alone.kept[:2] = store.kept[:2, part]
        torch.testing.assert_close(found, Signal(alone, [pools[layer]], kv_heads, 1.0, shift=0).score(batch())[0])


def test_a_rank_without_heads_of_a_group_adds_nothing_to_its_score() -> None:
    heads = Heads(((1, (0,)),))
    signal = Signal(store_of(heads), [keys_of(LIKES[1])], (0,), 1.0, shift=0, parts=(slice(0, 0), slice(0, 1)))
    first, second = signal.score(batch())
    assert not first.any() and second.sum(1).tolist() == pytest.approx([1.0, 1.0])


def test_heads_count_by_their_weights_in_whichever_part_they_are() -> None:
    parts = [Heads(((1, (0,)),), (3.0,)), Heads(((3, (1,)),), (0.5,))]
    heads = Heads.of(place for part in parts for place in part.each)
    pools, places = [keys_of(LIKES[1]), keys_of(LIKES[3])], heads.places(parts)
    signal = Signal(store_of(heads), pools, (0,) * heads.count, 1.0, shift=0, parts=places)
    first, second = signal.score(batch())
    assert first.sum(1).tolist() == pytest.approx([1.0, 1.0]) and second.sum(1).tolist() == pytest.approx([1.0, 1.0])
    (both,) = Signal(store_of(heads), pools, (0,) * heads.count, 1.0, shift=0).score(batch())
    torch.testing.assert_close(both, (3 * first + 0.5 * second) / 3.5)


def test_a_part_whose_heads_all_weigh_nothing_scores_nothing() -> None:
    heads = Heads(((1, (0,)), (3, (1,))), (0.0, 2.0))
    pools = [keys_of(LIKES[1]), keys_of(LIKES[3])]
    first, second = Signal(store_of(heads), pools, (0, 0), 1.0, shift=0, parts=(slice(0, 1), slice(1, 2))).score(
        batch()
    )
    assert not first.any() and second.sum(1).tolist() == pytest.approx([1.0, 1.0])


def test_ranks_scores_add_up_to_the_mean_over_all_heads() -> None:
    """Two ranks hold a head each, of weights 3 and 1: every rank divides by what all of them weigh."""
    both = Heads(((1, (0, 1)),), (3.0, 1.0))
    generator = torch.Generator().manual_seed(0)
    whole, pools = store_of(both), [torch.randn(200, 2, DIM, generator=generator)]
    whole.kept[:2] = torch.randn(2, 2, DIM, generator=generator)
    expected = Signal(whole, pools, (0, 1), 1.0, shift=0).score(batch())
    ranks = []
    for rank, weight in enumerate((3.0, 1.0)):
        own = store_of(Heads(((1, (0,)),), (weight,)))
        own.kept[:2] = whole.kept[:2, rank : rank + 1]
        pool = [pools[0][:, rank : rank + 1]]
        ranks.append(Signal(own, pool, (0,), 1.0, shift=0, totals=[4.0]).score(batch()))
    torch.testing.assert_close(ranks[0] + ranks[1], expected)


SHAPE = ModelShape(layers=4, heads=2, kv_heads=1, head_dim=DIM)
MIXED = Profile(
    SHAPE,
    SHAPE,
    Heads(((0, (0, 1)), (1, (0,)))),
    Heads(((3, (0, 1)),)),
    grouped_lookahead={2: GroupWeights(((1.0, 0.0), (0.25, 0.75)), (0.625, 0.875))},
    layer_groups=2,
)


@pytest.mark.parametrize("policy", ["lookahead", "hybrid", "hybrid-sum"])
def test_groups_that_weigh_the_drafts_layers_differently_read_different_lists(policy: str) -> None:
    """Draft layer 0 looks at 15 and 16, layer 1 at 9 and 8: the first group heeds layer 0 alone, the second layer 1."""
    grouping = Grouping(MIXED, POLICIES[policy](), LayerGroups(4, 2))
    heads = MIXED.lookahead
    store, pools = store_of(heads), [keys_of((15, 16)), keys_of((9, 8))]
    ahead = Signal(
        store, pools, (0,) * 3, 1.0, shift=0, parts=heads.places(grouping.lookahead), mix=grouping.mix("cpu")
    )
    back = Signal(store_of(MIXED.history), [keys_of((30, 11))], (0, 0), 1.0, shift=0)
    budget = grouping.budget(5 if policy == "hybrid" else 4, 1, 2)
    selection = Selector(grouping.policy, budget, ahead, back, pages=back).select(batch(), LENGTHS)
    assert selection.positions is not None and selection.positions.shape[0] == 2
    for row, (first, second) in enumerate([(15, 9), (16, 8)]):
        one, two = (set(listed[row]) for listed in selection.positions.tolist())
        assert first in one and second not in one and second in two and first not in two


def test_layers_are_mixed_by_the_mean_of_their_heads() -> None:
    grouping = Grouping(MIXED, POLICIES["hybrid-sum"](), LayerGroups(4, 2))
    mix = grouping.mix("cpu")
    assert mix is not None and mix.tolist() == [[1.0, 0.0], [0.25, 0.75]]
    assert grouping.budget(10, 1, 2).shares == (0.625, 0.875) and grouping.budget(10, 1, 2, share=0.25).shares == (
        0.25,
    )
    assert grouping.budget(10, 1, 2).by_source == {"protected": 3, "lookahead": 5, "history": 2}
    alone = grouping.of_one(1)
    assert alone.lookahead.each == ((0, 0, 0.125), (0, 1, 0.125), (1, 0, 0.75)) and alone.lookahead_share == 0.875


def test_a_policy_that_does_not_mix_has_histories_of_groups() -> None:
    grouping = Grouping(MIXED, POLICIES["history"](), LayerGroups(4, 2))
    assert grouping.weights is None and grouping.mix("cpu") is None and grouping.lookahead == (MIXED.lookahead,)
    assert [part.layers for part in grouping.history] == [(1,), (3,)]


def test_lookahead_alone_has_groups_where_the_profile_mixes_it() -> None:
    lookahead = POLICIES["lookahead"]
    assert lookahead.why_not_groups(2, mixed=True) is None and "use 1" in (lookahead.why_not_groups(2) or "")


def test_a_launch_takes_the_profiles_groups_unless_it_says(tmp_path: Path) -> None:
    file, nowhere = str(tmp_path / "mixed.json"), {"draft": "nowhere", "target": "nowhere"}
    save_profile(MIXED, file)
    assert load_profile(file, SHAPE, SHAPE).grouped_lookahead == MIXED.grouped_lookahead
    assert count_groups(DustinConfig(profile=file), nowhere) == 2
    assert count_groups(DustinConfig(profile=file, policy="history"), nowhere) == 1
    assert count_groups(DustinConfig(profile=file, layer_groups=1), nowhere) == 1
    assert count_groups(DustinConfig(), nowhere) == 1


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(layer_groups=4), "layer_groups is 4, which it does not describe"),
        (dict(grouped_lookahead={3: MIXED.grouped_lookahead[2]}), "2 groups stand under the number 3"),
        (dict(lookahead=Heads(((0, (0,)),))), "has weights for 2 layers, but 1 look ahead"),
    ],
)
def test_a_mixed_profile_that_makes_no_sense_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        replace(MIXED, **change)


def test_the_start_up_line_names_groups_their_layers_and_the_mass() -> None:
    shape = ModelShape(layers=6, heads=4, kv_heads=2, head_dim=16)
    profile, policy, config = auto_profile(shape, shape), POLICIES["hybrid"](), DustinConfig(mass=0.9)
    selector = Selector(policy, policy.budget(512, 4, 64, 0.5), None, None, None, 0.9)  # type: ignore[arg-type]
    grouping = Grouping(profile, policy, LayerGroups(6, 2))
    wiring = Wiring(selector, None, None, profile, grouping, "standalone", None)  # type: ignore[arg-type]
    assert wiring.describe(config).startswith(
        "dustin: policy hybrid, verification reads 123 to 512 positions (68 protected, 222 lookahead, 222 history), "
        "up to 0.9 of the estimated mass, in each of 2 groups of layers; profile auto (draft layers 3,4,5: 12 heads, "
        "target layer 2,4: 8 heads)"
    )
