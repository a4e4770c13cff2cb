"""Penalties that count every token of an accepted run.

SGLang's speculative decoding feeds its penalizers one token a round, the last of the accepted run, so the others are
never penalised and `min_new_tokens` counts rounds. Here a round feeds them all tokens that were confirmed since the
round before. Within a run its own tokens are not counted yet, and with overlap scheduling neither is the run before,
which is still on its way to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dustin_sglang.devices import to_device


def cumulate_runs(original: Callable[[Any], None], batch: Any) -> None:
    """Wrap `ScheduleBatch.cumulate_penalty_output_tokens`; batches of other algorithms are left to `original`."""
    from dustin_sglang.algorithm import NAME

    if getattr(batch.spec_algorithm, "name", "") != NAME:
        return original(batch)
    new = [_not_yet_counted(req) for req in batch.reqs]
    rows = [row for row, tokens in enumerate(new) for _ in tokens]
    counts = [len(tokens) for tokens in new]
    where = to_device([rows, [token for tokens in new for token in tokens]], batch.device)
    lengths = to_device([counts], batch.device)[0]
    for penalizer in batch.sampling_info.penalizer_orchestrator.penalizers.values():
        if penalizer.is_prepared():
            _count(penalizer, where[0], where[1], lengths)


def _not_yet_counted(req: Any) -> Sequence[int]:
    """Tokens of a request that no round has counted; a retracted request is prefilled and counted anew."""
    retractions, counted = getattr(req, "dustin_penalised", (req.retraction_count, 0))
    if retractions != req.retraction_count:
        counted = 0
    req.dustin_penalised = (req.retraction_count, len(req.output_ids))
    return req.output_ids[counted:]


def _count(penalizer: Any, rows: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
    """Add tokens to one penalizer's state, ``[batch, vocab]`` or ``[batch, 1]``.

    Parameters
    ----------
    rows, tokens : Tensor, int64 ``[n]``
        Request in the batch and token id of each new token.
    lengths : Tensor, int64 ``[batch]``
        New tokens of each request.
    """
    from sglang.srt.sampling import penaltylib

    if isinstance(penalizer, penaltylib.BatchedMinNewTokensPenalizer):
        penalizer.len_output_tokens += lengths.unsqueeze(1)
    elif isinstance(penalizer, penaltylib.BatchedFrequencyPenalizer):
        strengths = penalizer.frequency_penalties[rows, 0]
        penalizer.cumulated_frequency_penalties.index_put_((rows, tokens), strengths, accumulate=True)
    elif isinstance(penalizer, penaltylib.BatchedPresencePenalizer):
        penalizer.cumulated_presence_penalties[rows, tokens] = penalizer.presence_penalties[rows, 0]
    else:
        penalizer.cumulated_repetition_penalties[rows, tokens] = penalizer.repetition_penalties[rows, 0]
