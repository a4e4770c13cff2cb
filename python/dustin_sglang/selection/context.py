"""The batch that a selection is made for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Triton compiles a kernel anew for rows that begin at multiples of 16 elements. So all rows do: whichever is met first,
# the other would be compiled in the middle of serving.
_ALIGNMENT = 16


def score_width(seq_len: int) -> int:
    """Width of the scores of a batch whose longest context has `seq_len` tokens."""
    return -(-seq_len // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Context:
    """The committed context of a batch.

    Attributes
    ----------
    req_to_token
        int32 ``[slots, width]``, SGLang's table of KV slots.
    req_pool_indices
        int64 ``[batch]``, each request's row in it.
    seq_lens
        int64 ``[batch]``, committed lengths.
    max_len
        Width of the scores, known to the host: at least the largest of them.
    """

    req_to_token: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    max_len: int

    def repeated(self, count: int) -> Context:
        """The batch `count` times over, one after the other; itself for 1."""
        if count == 1:
            return self
        rows, lengths = self.req_pool_indices.repeat(count), self.seq_lens.repeat(count)
        return Context(self.req_to_token, rows, lengths, self.max_len)
