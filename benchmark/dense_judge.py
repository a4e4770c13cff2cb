"""What the target itself, read densely by transformers, says about an answer that it gave under sparse attention."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

PART = 1024  # tokens of a forward: a long prompt in one would need a square of scores


def load_judge(target: str | Path) -> Any:
    """Load the target in float32, on the GPU if there is one."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).to(device)


@torch.inference_mode()
def judge(model: Any, prompt: list[int], answers: Sequence[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Whether the target would have chosen each token of some answers too, and its log-probability of it.

    The prompt is read once for all of its answers.

    Parameters
    ----------
    model
        Of `load_judge`.

    Returns
    -------
    list of tuple of Tensor
        For each answer bool and float32 ``[len(answer)]``, on the CPU.
    """
    from transformers import DynamicCache

    cache, verdicts = DynamicCache(), []
    first = _read(model, prompt, cache)[-1:]
    for answer in answers:
        logits = torch.cat([first, _read(model, answer[:-1], cache, keep_all=True)])
        cache.crop(len(prompt))
        chosen = torch.tensor(answer, device=model.device)
        logprobs = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        verdicts.append(((logits.argmax(-1) == chosen).cpu(), logprobs.cpu()))
    return verdicts


def _read(model: Any, ids: list[int], cache: Any, keep_all: bool = False) -> torch.Tensor:
    """Read tokens behind a cache, a part at a time; return the logits of all places, or of each part's last."""
    logits = [torch.empty(0, model.config.vocab_size, device=model.device)]
    for part in torch.tensor([ids], device=model.device).split(PART, dim=1):
        if part.shape[1]:
            output = model(part, past_key_values=cache, use_cache=True, logits_to_keep=0 if keep_all else 1)
            logits.append(output.logits[0].float())
    return torch.cat(logits)


@torch.inference_mode()
def preference(model: Any, ids: list[int], one: int, other: int) -> float:
    """Nats by which the target prefers token `one` to token `other` behind `ids`."""
    logits = model(torch.tensor([ids], device=model.device), logits_to_keep=1).logits[0, -1].float()
    return float(logits[one] - logits[other])


@torch.inference_mode()
def divergence(
    model: Any, ids: list[int], best: list[list[int]], logprobs: list[list[float]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far log-probabilities of the last tokens' places are from the target's own there.

    Parameters
    ----------
    ids
        Prompt and answer.
    best, logprobs
        For each of the answer's last ``n`` tokens the same number of tokens, best first, and their log-probabilities in
        nats.

    Returns
    -------
    tuple of Tensor
        KL(target || given) in nats, float32 ``[n]``, where all tokens that are not given count as one: a lower bound;
        and bool ``[n]``, whether the best token is the same. On the CPU.
    """
    rows = len(best)
    logits = model(torch.tensor([ids], device=model.device), logits_to_keep=rows + 1).logits[0, :-1].float()
    p = torch.cat([part.log_softmax(-1) for part in logits.split(256)])
    chosen = torch.tensor(best, device=p.device)
    ours, theirs = p.gather(1, chosen), torch.tensor(logprobs, device=p.device)
    kl = (ours.exp() * (ours - theirs)).sum(1)
    rest, their_rest = ((1 - part.exp().sum(1)).clamp(min=1e-6) for part in (ours, theirs))
    kl = kl + rest * (rest / their_rest).log()
    return kl.cpu(), (p.argmax(-1) == chosen[:, 0]).cpu()
