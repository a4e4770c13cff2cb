"""Semantic retrieval heads: attention on a needle's whole span while a model answers the question about it.

The paper ranks heads as CompressKV does (arXiv 2508.02401; method-and-limits.md 1.2): a fact is planted in a long
haystack, and a head scores the attention mass that it puts on the fact's span, averaged over the answer's tokens,
counted only where the answer succeeds. Here the answer is teacher-forced and succeeds when more than half of its tokens
are the model's own choice, which stands in for CompressKV's ROUGE-1 recall above 50.
"""

from __future__ import annotations

import torch

from dustin_sglang.calibrate.texts import Needle
from dustin_sglang.calibrate.trace import Layer, attention_weights
from dustin_sglang.profile import ModelShape

_MIN_RIGHT = 0.5


class RetrievalMass:
    """Collects the ranking of one model's heads over one needle.

    Parameters
    ----------
    shape
        The model's.
    needle
        Where fact and answer are in the tokens that this model reads.

    Attributes
    ----------
    mass
        float32 ``[layers, heads]``, attention on the fact's span, averaged over the rows that predict the answer.
    """

    def __init__(self, shape: ModelShape, needle: Needle) -> None:
        self.mass = torch.zeros(shape.layers, shape.heads)
        self.rows = list(range(needle.answer[0] - 1, needle.answer[1] - 1))
        self._needle = needle

    def see(self, layer: Layer) -> None:
        """Add one layer."""
        start, end = self._needle.span
        keys = layer.k[:, : self.rows[-1] + 1]
        weights = attention_weights(layer.q[:, self.rows], keys, layer.scale, own_rows=True)
        self.mass[layer.index] = weights[:, :, start:end].sum(-1).mean(-1).cpu()

    def counted(self, logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
        """`mass`, or zeros where the answer fails.

        Parameters
        ----------
        logits
            ``[rows, vocab]`` of `rows`.
        ids
            What the model read.
        """
        expected = torch.tensor([ids[row + 1] for row in self.rows], device=logits.device)
        right = (logits.argmax(-1) == expected).float().mean()
        return self.mass if right > _MIN_RIGHT else torch.zeros_like(self.mass)
