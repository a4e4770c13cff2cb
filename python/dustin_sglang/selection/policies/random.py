"""Positions drawn without looking: a floor for the signals."""

import torch

from dustin_sglang.selection.context import Context
from dustin_sglang.selection.policies.base import Budget, Policy


class Random(Policy):
    """Pseudo-random positions beside the protected ones: the floor that a signal has to beat.

    A hash of position and length, not a generator: every rank must draw the same list without talking.
    """

    name = "random"

    def budget(self, total: int, sinks: int, window: int, lookahead_share: float) -> Budget:
        return Budget(total, sinks, window, 0, rest="random")

    def select(
        self, budget: Budget, lookahead: torch.Tensor | None, history: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        position = torch.arange(context.max_len, device=context.seq_lens.device).unsqueeze(0)
        x = ((position + 1) * 0x9E3779B1) ^ (context.seq_lens.unsqueeze(1) * 0x85EBCA6B)
        x = ((x ^ (x >> 15)) * 0x2C1B3C6D) & 0x7FFFFFFF
        return super().select(budget, None, (x & 0xFFFFFF).to(torch.float32), context)
