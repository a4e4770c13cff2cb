"""What rectification's benchmark computes, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import rectification
import torch
from dense_judge import divergence, preference


class Bigram:
    """A model whose next token depends on the last alone."""

    device = "cpu"

    def __init__(self, vocab: int) -> None:
        self.table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(0))

    def __call__(self, ids: torch.Tensor, logits_to_keep: int) -> Any:
        return SimpleNamespace(logits=self.table[ids][:, -logits_to_keep:])


def test_divergence_is_zero_from_itself_and_positive_from_another() -> None:
    model, ids, later = Bigram(11), [3, 4, 5, 6, 7], 3
    exact = model.table[[4, 5, 6]].log_softmax(-1)  # the places of the last three tokens
    given, tokens = exact.topk(4, -1)
    kl, agrees = divergence(model, ids, tokens.tolist(), given.tolist())
    assert kl.shape == (later,) and torch.allclose(kl, torch.zeros(later), atol=1e-6) and agrees.all()
    other = (2 * model.table[[4, 5, 6]]).log_softmax(-1)
    given, tokens = other.topk(4, -1)
    kl, agrees = divergence(model, ids, tokens.tolist(), given.tolist())
    whole = (exact.exp() * (exact - other)).sum(-1)
    assert (kl > 0.01).all() and (kl <= whole + 1e-6).all() and agrees.all()
    swapped = [[row[1], row[0], *row[2:]] for row in tokens.tolist()]
    assert not divergence(model, ids, swapped, given.tolist())[1].any()


def test_preference_is_the_difference_of_two_log_probabilities() -> None:
    model = Bigram(11)
    logprobs = model.table[4].log_softmax(-1)
    assert preference(model, [3, 4], 7, 2) == pytest.approx(float(logprobs[7] - logprobs[2]), abs=1e-5)


def test_intervals_are_paired_by_prompt() -> None:
    draw = np.random.default_rng(0)
    cost = dict(tokens_s=100.0, step_ms=10.0)
    # Prompts differ by far more than rectification does.
    never = [np.stack([level + draw.normal(0, 0.01, 50), np.full(50, 0.8)], axis=1) for level in range(20)]
    often = [values - [0.1, -0.1] for values in never]
    row = rectification.compare(dict(tokens_s=80.0, step_ms=15.0), often, (cost, never), seed=0)
    assert (row["tokens_s_ratio"], row["step_ratio"], row["prompts"]) == (0.8, 1.5, 20)
    assert row["kl_minus_never"] == pytest.approx(-0.1) and row["agreement_minus_never"] == pytest.approx(0.1)
    low, high = row["ci"]["kl_minus_never"]
    assert high - low < 1e-6 < row["ci"]["kl"][1] - row["ci"]["kl"][0]
    first = rectification.compare(cost, never, None, seed=0)
    assert "kl_minus_never" not in first and "tokens_s_ratio" not in first


def test_never_comes_first_whatever_is_asked_for() -> None:
    assert rectification.parse(["--text", "t"]).intervals == [0, 64, 16]
    assert rectification.parse(["--text", "t", "--intervals", "32", "0"]).intervals == [0, 32]
