"""What the target itself, read densely by transformers, says about an answer that it gave under sparse attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load_judge(target: str | Path) -> Any:
    """Load the target in float32, on the GPU if there is one."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).to(device)


@torch.inference_mode()
def judge(model: Any, prompt: list[int], answer: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether the target would have chosen each token of the answer there too, and its log-probability of it.

    Parameters
    ----------
    model
        Of `load_judge`.

    Returns
    -------
    tuple of Tensor
        bool and float32 ``[len(answer)]``, on the CPU.
    """
    ids = torch.tensor([prompt + answer], device=model.device)
    logits = model(ids, logits_to_keep=len(answer) + 1).logits[0, :-1].float()
    chosen = ids[0, -len(answer) :]
    logprobs = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
    return (logits.argmax(-1) == chosen).cpu(), logprobs.cpu()


@torch.inference_mode()
def preference(model: Any, ids: list[int], one: int, other: int) -> float:
    """Nats by which the target prefers token `one` to token `other` behind `ids`."""
    logits = model(torch.tensor([ids], device=model.device), logits_to_keep=1).logits[0, -1].float()
    return float(logits[one] - logits[other])
