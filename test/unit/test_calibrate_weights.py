"""The fit of weights finds the heads that matter, in cases made so that one can see which these are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dustin_sglang.calibrate.evaluate import choose_with, recall_curve
from dustin_sglang.calibrate.mass import ListSize
from dustin_sglang.calibrate.search import score
from dustin_sglang.calibrate.weights import Examples, Fitted, cross_entropy, fit_heads, missed_mass
from dustin_sglang.calibrate.windows import Window
from dustin_sglang.profile import ModelShape, Profile, load_profile, save_profile
from dustin_sglang.selection.heads import Heads

CONTEXT, ROWS = 200, 5
SIZE = ListSize(budget=30, sinks=2, window=8)
DRAFT = ModelShape(layers=3, heads=2, kv_heads=1, head_dim=8)
TARGET = ModelShape(layers=1, heads=2, kv_heads=1, head_dim=8)
EVERY = Heads(((0, (0, 1)), (1, (0, 1)), (2, (0, 1))))
BOTH = Heads(((0, (0, 1)),))


def peaks(generator: torch.Generator) -> torch.Tensor:
    """Attention ``[CONTEXT]`` of one head that looks at a few places."""
    noise = torch.rand(CONTEXT, generator=generator)
    return (8 * noise.square()).exp() / (8 * noise.square()).exp().sum()


def window(seed: int) -> Window:
    """The target attends to what draft head (1, 0) says and, half as much, to what its own head 1 said.

    The other heads look elsewhere.
    """
    generator = torch.Generator().manual_seed(seed)
    ahead = torch.stack([peaks(generator) for _ in range(6)]).view(3, 2, CONTEXT) * ROWS
    back = torch.stack([peaks(generator) for _ in range(2)]).view(1, 2, CONTEXT)
    wanted = ahead[1, 0] / ROWS + back[0, 1] / 2
    none = torch.zeros(1, 2)
    return Window(wanted.unsqueeze(0), ahead.half(), back.half(), none, none)


WINDOWS = [window(seed) for seed in range(6)]
UNSEEN = [window(seed) for seed in range(6, 9)]


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    return fit_heads(WINDOWS, EVERY, BOTH, SIZE, ROWS, layers=2, device="cpu")


def profile_of(fitted: Fitted) -> Profile:
    return Profile(DRAFT, TARGET, fitted.lookahead, fitted.history, fitted.share)


def test_the_head_that_matters_gets_all_and_a_useless_head_nothing(fitted: Fitted) -> None:
    assert (1, 0, 1.0) in fitted.lookahead.each and (0, 1, 1.0) in fitted.history.each
    others = [weight for *_, weight in (*fitted.lookahead.each, *fitted.history.each) if weight < 1]
    assert all(0.01 <= weight < 0.15 for weight in others)
    assert len(fitted.lookahead.layers) <= 2


def test_the_share_is_the_ratio_of_both_signals(fitted: Fitted) -> None:
    # Twice as much attention comes from lookahead, whatever its rows add up to.
    assert fitted.share == pytest.approx(2 / 3, abs=0.06)


def test_the_share_makes_hybrid_sum_weigh_as_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any step of Adam the weights are known: each head 1 / (heads x rows)."""
    for steps in ("_STEPS", "_FINE"):
        monkeypatch.setattr(f"dustin_sglang.calibrate.weights.{steps}", 0)
    for rows in (5, 1):
        start = fit_heads(WINDOWS, EVERY, BOTH, SIZE, rows, layers=3, device="cpu")
        assert start.lookahead == EVERY and start.history == BOTH and start.share == 0.5
        found = choose_with("hybrid-sum", profile_of(start))(WINDOWS[0], SIZE)[0]
        plain = score(WINDOWS[0].lookahead, EVERY) / 30 + score(WINDOWS[0].history, BOTH) / 2
        best = (SIZE.middle(plain).topk(SIZE.free).indices + SIZE.sinks).sort().values
        assert torch.equal(found[SIZE.sinks : -SIZE.window].long(), best)


def test_a_list_catches_more_than_with_equal_weights_where_nothing_was_fitted(fitted: Fitted) -> None:
    equal = Profile(DRAFT, TARGET, EVERY, BOTH)
    values = [recall_curve(choose_with("hybrid-sum", p), UNSEEN, [SIZE])[0] for p in (profile_of(fitted), equal)]
    assert values[0] > 0.97 and values[0] > values[1] + 0.1


def test_the_fit_is_the_same_again(fitted: Fitted) -> None:
    assert fit_heads(WINDOWS, EVERY, BOTH, SIZE, ROWS, layers=2, device="cpu") == fitted


def test_elimination_keeps_the_layer_that_knows() -> None:
    lines = list[str]()
    one = fit_heads(WINDOWS, EVERY, BOTH, SIZE, ROWS, layers=1, device="cpu", report=lines.append)
    assert one.lookahead.layers == (1,)
    assert [line.split(":")[0] for line in lines[:2]] in (
        [f"lookahead - draft layer {layer}" for layer in order] for order in ((0, 2), (2, 0))
    )


def test_the_losses_by_hand() -> None:
    # Four candidates of a middle of more: two heads, and a list of two.
    scores = torch.tensor([[[4.0, 2, 0, 0], [0, 0, 6, 1]]])
    wanted = torch.tensor([[0.5, 0.25, 0.0, 0.0]])
    examples = Examples(scores, torch.tensor([[8.0, 8]]), wanted, free=2)
    right, wrong = torch.tensor([2.0, 0]), torch.tensor([0, 3.0])
    expected = -(0.5 * torch.tensor(0.5).log() + 0.25 * torch.tensor(0.25).log())
    torch.testing.assert_close(cross_entropy(right, examples), expected)
    assert cross_entropy(wrong, examples) > 10
    # The last listed position is caught by half, as the sigmoid has it.
    assert missed_mass(right, examples) == pytest.approx(0.25 * 0.5 / 0.75, abs=1e-2)
    assert missed_mass(wrong, examples) > 0.99
    assert missed_mass(right * 7, examples) == missed_mass(right, examples), "the scale is free"


def test_missed_mass_does_not_fall_when_all_scores_rise() -> None:
    """One head is flat over the candidates and has no mass elsewhere; adding it lists no other positions."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.stack([torch.rand(1, 40, generator=generator), torch.ones(1, 40)], dim=1)
    examples = Examples(scores, torch.tensor([[60.0, 40]]), scores[:, 0] / 60, free=10)
    logs = torch.zeros(2).requires_grad_(True)
    missed_mass(logs.exp(), examples).backward()
    assert logs.grad is not None and logs.grad[1] > 0


def test_a_fitted_profile_round_trips(fitted: Fitted, tmp_path: Path) -> None:
    file = tmp_path / "fitted.json"
    save_profile(profile_of(fitted), str(file))
    loaded = load_profile(str(file), DRAFT, TARGET)
    assert (loaded.lookahead, loaded.history) == (fitted.lookahead, fitted.history)
    assert loaded.lookahead_share == fitted.share
    for *_, weight in loaded.lookahead.each:
        assert weight == float(f"{weight:.4g}")
