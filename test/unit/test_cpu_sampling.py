"""Verification on the CPU draws from the target's distribution, drafts or no drafts."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dustin_sglang.cpu import SHIMS

if str(SHIMS) not in sys.path:
    pytest.skip("needs SGLang's CPU engine", allow_module_level=True)

from dustin_sglang.cpu import sampling

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0]])


def info(temperature: float = 1.0, top_k: int = 1 << 30, top_p: float = 1.0, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        temperatures=torch.tensor([[temperature]]),
        top_ks=torch.tensor([top_k], dtype=torch.int32),
        top_ps=torch.tensor([top_p]),
        **({"is_all_greedy": False} | changes),
    )


@pytest.mark.parametrize(
    "sampling_info, expected",
    [
        (info(), torch.softmax(LOGITS, -1)),
        (info(temperature=0.5), torch.softmax(2 * LOGITS, -1)),
        (info(top_k=1), torch.tensor([[1.0, 0, 0, 0]])),
        (info(top_k=2), torch.softmax(torch.tensor([[2.0, 1.0, -torch.inf, -torch.inf]]), -1)),
        # The best token has 0.64, the next 0.24: the smallest set that holds 0.7 is both.
        (info(top_p=0.7), torch.softmax(torch.tensor([[2.0, 1.0, -torch.inf, -torch.inf]]), -1)),
        # Of the two best alone the first has 0.73: top_p counts after top_k.
        (info(top_k=2, top_p=0.7), torch.tensor([[1.0, 0, 0, 0]])),
    ],
)
def test_temperature_then_top_k_then_top_p(sampling_info: SimpleNamespace, expected: torch.Tensor) -> None:
    torch.testing.assert_close(sampling.target_probs(LOGITS, sampling_info, nodes=1), expected)


def test_equal_logits_leave_the_first_to_a_greedy_request_as_argmax_does() -> None:
    probs = sampling.target_probs(torch.zeros(1, 50), info(top_k=1), nodes=1)
    assert probs[0].tolist() == [1.0] + [0.0] * 49


def test_a_node_without_any_token_still_has_a_distribution() -> None:
    probs = sampling.target_probs(torch.full((1, 4), -torch.inf), info(temperature=0.5), nodes=1)
    assert probs.sum() == 1 and (probs >= 0).all()


def verify(monkeypatch: pytest.MonkeyPatch, requests: int, drafted: list[int]) -> tuple[torch.Tensor, ...]:
    """Verify the chain `drafted` for `requests` requests whose target gives `LOGITS` everywhere."""
    monkeypatch.setattr("sglang.srt.distributed.get_tp_group", lambda: SimpleNamespace(world_size=1))
    nodes = len(drafted) + 1
    rows = torch.arange(requests * nodes).view(requests, nodes)
    child = torch.tensor([*range(1, nodes), -1]).repeat(requests, 1)
    verify_input = SimpleNamespace(
        draft_token_num=nodes,
        draft_token=torch.tensor([0, *drafted]).repeat(requests),
        retrieve_index=rows,
        retrieve_next_token=child,
        retrieve_next_sibling=torch.full_like(child, -1),
    )
    sampling_info = info(top_k=3)
    for name in ("temperatures", "top_ks", "top_ps"):
        value = getattr(sampling_info, name)
        setattr(sampling_info, name, value.repeat(requests, *[1] * (value.dim() - 1)))
    batch = SimpleNamespace(
        sampling_info=sampling_info,
        seq_lens=torch.zeros(requests),
        forward_mode=SimpleNamespace(is_idle=lambda: False),
    )
    output = SimpleNamespace(next_token_logits=LOGITS.repeat(requests * nodes, 1))
    empty = (
        torch.zeros(requests * nodes, dtype=torch.int32),
        torch.zeros(requests, dtype=torch.int32),
        torch.full((requests, nodes), -1, dtype=torch.int32),
    )
    return sampling.sample_verified(lambda *args: empty, verify_input, batch, output)


def test_the_token_after_a_node_has_the_targets_distribution_whatever_was_drafted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    requests, drafted = 20_000, [0, 1]
    predict, accept_lens, accept_index = verify(monkeypatch, requests, drafted)
    expected = torch.softmax(torch.tensor([2.0, 1.0, 0.0]), -1)
    first = predict.view(requests, 3)[:, 0]
    observed = torch.bincount(first, minlength=4) / requests
    torch.testing.assert_close(observed[:3], expected, atol=0.01, rtol=0)
    assert observed[3] == 0, "top_k leaves it out"
    # A draft is accepted exactly when it is what was drawn.
    lengths = 1 + (first == drafted[0]).int() * (1 + (predict.view(requests, 3)[:, 1] == drafted[1]).int())
    assert accept_lens.tolist() == lengths.tolist()
    assert ((accept_index >= 0).sum(1) == accept_lens).all()
