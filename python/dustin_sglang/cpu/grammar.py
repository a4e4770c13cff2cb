"""Grammars on the CPU: SGLang's xgrammar backend allocates pinned memory and applies its masks on accelerators alone.

Without these two functions the first request with a grammar ends the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_BITS = 32


def allocate_token_bitmask(vocab_size: int, batch_size: int) -> torch.Tensor:
    """Replace xgrammar_backend's `_allocate_token_bitmask`: the same mask in ordinary memory.

    Returns
    -------
    Tensor, int32 ``[batch_size, ceil(vocab_size / 32)]``
        Every bit set: every token allowed.
    """
    return torch.full((batch_size, -(-vocab_size // _BITS)), -1, dtype=torch.int32)


def apply_vocab_mask(
    original: Callable[..., None], grammar: Any, logits: torch.Tensor, vocab_mask: torch.Tensor
) -> None:
    """Wrap `XGrammarGrammar.apply_vocab_mask`: set the logits of forbidden tokens to -inf, in place.

    Parameters
    ----------
    logits : Tensor, float ``[rows, vocab]``
    vocab_mask : Tensor, int32 ``[rows, ceil(vocab / 32)]``
        Bit t of word w allows token ``32 w + t``.
    """
    if logits.device.type != "cpu":
        return original(grammar, logits, vocab_mask)
    bits = (vocab_mask[:, :, None] >> torch.arange(_BITS, dtype=torch.int32)) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
