"""mix_scores: the kernel (interpreted) and its reference against float64, and what both must keep."""

import os

import pytest
import torch

from dustin_kernels import mix, mix_scores

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = [
    "reference",
    pytest.param("triton", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(mix, "_BLOCK", 64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_hand_computed(backend):
    scores = torch.tensor([[[1.0, 2.0]], [[10.0, 0.0]], [[0.0, 100.0]]])
    weights = torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.25, 0.0]])
    assert mix_scores(scores, weights, backend=backend).tolist() == [[[1.0, 52.0]], [[2.5, 0.0]]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("parts, groups", [(1, 1), (7, 4), (3, 5), (8, 2)])
def test_random_scores(backend, parts, groups):
    generator = torch.Generator().manual_seed(parts)
    scores = torch.rand(parts, 3, 101, generator=generator)
    weights = torch.rand(groups, parts, generator=generator)
    expected = torch.einsum("gp,pbn->gbn", weights.double(), scores.double())
    torch.testing.assert_close(mix_scores(scores, weights, backend=backend).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_alone_and_in_a_batch_give_the_same_bits(backend):
    scores, weights = torch.rand(7, 3, 150), torch.rand(4, 7)
    together = mix_scores(scores, weights, backend=backend)
    for b in range(3):
        alone = mix_scores(scores[:, b : b + 1].contiguous(), weights, backend=backend)
        assert torch.equal(alone, together[:, b : b + 1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty(backend):
    assert mix_scores(torch.empty(2, 0, 5), torch.ones(3, 2), backend=backend).shape == (3, 0, 5)


@pytest.mark.parametrize(
    "scores, weights, message",
    [
        (torch.ones(2, 3), torch.ones(1, 2), "scores has shape"),
        (torch.ones(2, 1, 3), torch.ones(1, 3), "weights has shape"),
        (torch.ones(2, 1, 3).double(), torch.ones(1, 2), "scores is torch.float64"),
        (torch.ones(2, 3, 1).transpose(0, 1), torch.ones(1, 3), "must be contiguous"),
    ],
)
def test_bad_arguments(scores, weights, message):
    with pytest.raises(ValueError, match=message):
        mix_scores(scores, weights)
