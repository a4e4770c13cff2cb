"""The fit finds what each group of layers makes of the draft's layers, in cases made so that one can see it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dustin_sglang.calibrate.evaluate import choose_with, recall_curve
from dustin_sglang.calibrate.mass import ListSize
from dustin_sglang.calibrate.weights import Examples, Fitted, fit_layers, improve, likelihood
from dustin_sglang.calibrate.windows import Window
from dustin_sglang.profile import GroupWeights, ModelShape, Profile, load_profile, save_profile
from dustin_sglang.selection.heads import Heads
from dustin_sglang.selection.layer_groups import LayerGroups

CONTEXT, ROWS = 200, 5
SIZE = ListSize(budget=30, sinks=2, window=8)
DRAFT = ModelShape(layers=3, heads=2, kv_heads=1, head_dim=8)
TARGET = ModelShape(layers=2, heads=2, kv_heads=1, head_dim=8)
BACK = Heads(((1, (0, 1)),))
GROUPS = [LayerGroups(2, 1), LayerGroups(2, 2)]


def peaks(generator: torch.Generator) -> torch.Tensor:
    """Attention ``[CONTEXT]`` of one head that looks at a few places."""
    noise = torch.rand(CONTEXT, generator=generator)
    return (8 * noise.square()).exp() / (8 * noise.square()).exp().sum()


def window(seed: int) -> Window:
    """The target's first layer attends to what draft layer 1 says; its second to layer 2's and, twice, to history's.

    Draft layer 0 looks elsewhere.
    """
    generator = torch.Generator().manual_seed(seed)
    ahead = torch.stack([peaks(generator) for _ in range(6)]).view(3, 2, CONTEXT) * ROWS
    back = torch.stack([peaks(generator) for _ in range(4)]).view(2, 2, CONTEXT)
    said, before = ahead.mean(1) / ROWS, back[1].mean(0)
    none = torch.zeros(1, 2)
    return Window(torch.stack([said[1], said[2] / 3 + before * 2 / 3]), ahead.half(), back.half(), none, none)


WINDOWS = [window(seed) for seed in range(8)]
UNSEEN = [window(seed) for seed in range(8, 12)]


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    return fit_layers(WINDOWS, BACK, GROUPS, SIZE, ROWS, count=2, device="cpu")


def profile_of(fitted: Fitted) -> Profile:
    every = Heads(tuple((layer, (0, 1)) for layer in fitted.layers))
    return Profile(DRAFT, TARGET, every, BACK, grouped_lookahead=fitted.groups, layer_groups=2)


def test_the_layer_that_knows_nothing_goes(fitted: Fitted) -> None:
    assert fitted.layers == (1, 2)


def test_each_group_gets_its_own_mixture(fitted: Fitted) -> None:
    first, second = fitted.groups[2].lookahead
    assert first[0] > 0.95 and second[1] > 0.95
    assert fitted.groups[2].shares[0] > 0.95
    assert fitted.groups[2].shares[1] == pytest.approx(1 / 3, abs=0.03)
    # Both layers count the same in one list: a half of layer 1, a sixth of layer 2, a third of history.
    assert fitted.groups[1].lookahead[0] == pytest.approx((0.75, 0.25), abs=0.03)
    assert fitted.groups[1].shares[0] == pytest.approx(2 / 3, abs=0.03)


def test_no_step_lowers_the_likelihood() -> None:
    examples = Examples.of(WINDOWS, range(3), BACK, GROUPS[1], SIZE, ROWS, "cpu")
    weights = torch.full((2, 4), 0.25)
    before = likelihood(weights, examples)
    for _ in range(20):
        weights = improve(weights, examples, 1)
        after = likelihood(weights, examples)
        assert (after >= before - 1e-6).all() and weights.sum(1).tolist() == pytest.approx([1, 1])
        before = after


def test_the_likelihood_and_a_step_by_hand() -> None:
    """Two parts over four positions, all attention on the first: a step raises the part that is there alone."""
    parts = torch.tensor([[[1.0, 0, 0, 0], [0.25, 0.25, 0.25, 0.25]]])
    examples = Examples(parts, torch.ones(1, 2), torch.tensor([[[1.0, 0, 0, 0]]]))
    weights = torch.tensor([[0.5, 0.5]])
    assert float(likelihood(weights, examples)) == pytest.approx(float(torch.tensor(0.625).log()), abs=1e-5)
    # Expectation maximisation of a mixture: the part's share in the score where the attention is.
    assert improve(weights, examples, 1)[0].tolist() == pytest.approx([0.5 / 0.625, 0.125 / 0.625], abs=1e-5)


def test_lists_of_groups_catch_more_than_one_list_and_than_equal_weights(fitted: Fitted) -> None:
    profile = profile_of(fitted)
    plain = replace(profile, grouped_lookahead={}, layer_groups=1)
    two, one, equal = (
        recall_curve(choose_with("hybrid-sum", p, ROWS, count), UNSEEN, [SIZE])[0]
        for p, count in ((profile, 2), (profile, 1), (plain, 1))
    )
    assert two > one + 0.1 and one > equal


def test_the_fit_is_the_same_again(fitted: Fitted) -> None:
    assert fit_layers(WINDOWS, BACK, GROUPS, SIZE, ROWS, count=2, device="cpu") == fitted


def test_a_fitted_profile_round_trips(fitted: Fitted, tmp_path: Path) -> None:
    file = tmp_path / "fitted.json"
    save_profile(profile_of(fitted), str(file))
    loaded = load_profile(str(file), DRAFT, TARGET)
    assert loaded.grouped_lookahead == fitted.groups and loaded.layer_groups == 2


@pytest.mark.parametrize(
    "lookahead, shares, message",
    [
        (((0.5, 0.6),), (0.5,), "must be at least 0 and sum to 1"),
        (((1.5, -0.5),), (0.5,), "must be at least 0 and sum to 1"),
        (((1.0,), (0.5, 0.5)), (0.5, 0.5), "different numbers of layers"),
        (((1.0,),), (0.5, 0.5), "a number in 0..1 for each"),
        (((1.0,),), (1.5,), "a number in 0..1 for each"),
    ],
)
def test_weights_that_make_no_sense_are_refused(
    lookahead: tuple[tuple[float, ...], ...], shares: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        GroupWeights(lookahead, shares)
