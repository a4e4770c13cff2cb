"""Attention of the draft model while it drafts several tokens in a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from dustin_sglang.cpu.attention import CpuAttnBackend
from dustin_sglang.cpu.segments import Segment

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class CpuMultiStepDraftBackend:
    """One attention backend for each drafting step.

    In step i every branch of every request has one row. It sees the committed context and what its own branch has
    written in steps 0 to i; branches do not see each other. SGLang never feeds the last drafted token back, so there is
    one backend less than there are steps.

    Parameters
    ----------
    model_runner : ModelRunner
        The draft model's.
    topk : int
        Branches.
    speculative_num_steps : int
        Drafting steps.

    Attributes
    ----------
    attn_backends : list of CpuAttnBackend
        SGLang runs step i under ``attn_backends[i]``.
    """

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: ModelRunner, topk: int, speculative_num_steps: int) -> None:
        self.topk = topk
        self.speculative_num_steps = speculative_num_steps
        steps = range(speculative_num_steps - 1)
        self.attn_backends = [self.create_step_backend(model_runner, step) for step in steps]

    def create_step_backend(self, model_runner: ModelRunner, step: int) -> CpuAttnBackend:
        """Backend of one step; a subclass may return one that also records queries."""
        return CpuAttnBackend(model_runner)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Prepare all steps of a round.

        Parameters
        ----------
        forward_batch : ForwardBatch
            ``seq_lens`` is the committed length; ``out_cache_loc`` holds the slots of the whole round, int64
            ``[bs * topk * slots]`` with a branch's slots side by side. Taking what a branch reads from there, and not
            from ``req_to_token``, makes it the same as what it writes for every page layout.
        """
        if forward_batch.forward_mode.is_idle() or not self.attn_backends:
            contexts = []
        else:
            contexts = self.attn_backends[0].committed_slots(forward_batch)
        for backend, segments in zip(self.attn_backends, self.step_segments(forward_batch, contexts), strict=True):
            backend.forward_metadata = segments

    def step_segments(self, forward_batch: ForwardBatch, contexts: list[torch.Tensor]) -> list[list[Segment]]:
        """Segments of each step over these context slots, int64 ``[kv_b]`` a request; none for an idle batch."""
        steps = range(len(self.attn_backends))
        if not contexts:
            return [[] for _ in steps]
        drafts = forward_batch.out_cache_loc.long().view(len(contexts), self.topk, -1)
        dtype = self.attn_backends[0].dtype
        return [
            [self._segment(b, context, drafts[b, :, : step + 1], dtype) for b, context in enumerate(contexts)]
            for step in steps
        ]

    def _segment(self, request: int, context: torch.Tensor, drafts: torch.Tensor, dtype: torch.dtype) -> Segment:
        """All branches of a request: context, then branch after branch (``drafts`` is int64 ``[topk, written]``)."""
        rows = slice(request * self.topk, (request + 1) * self.topk)
        slots = torch.cat([context, drafts.reshape(-1)])
        if self.topk == 1:
            return Segment(rows, slots)
        own = torch.eye(self.topk, dtype=torch.bool).repeat_interleave(drafts.shape[1], dim=1)
        hidden = torch.zeros(own.shape, dtype=dtype).masked_fill_(~own, float("-inf"))
        return Segment(rows, slots, pad(hidden, (context.numel(), 0)))
