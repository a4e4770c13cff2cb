"""Rectification: a dense pass over committed tokens replaces KV that sparse verification left approximate.

Such a pass is a prefill chunk whose KV slots exist already. The target reads everything before the chunk and writes its
keys and values in place; the draft follows with the same tokens shifted by one and the target's hidden states. What it
writes is what a fresh prefill would write, so `exact_len` moves to the chunk's end.

It runs at the beginning of a round, before the draft, over tokens whose ids the host knows. Under overlap scheduling
these end one round before the committed length. At most one pass runs between two verifications, and at most
`MAX_TOKENS` are in it, which bounds what the other requests wait for it. Every decision follows from numbers of the
host that all tensor-parallel ranks share.

A request is due by its own tokens alone. If others went along there would be fewer passes, but what a request answers
would then depend on how much its neighbours accept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from dustin_sglang import metrics
from dustin_sglang.config import MAX_RECTIFY_INTERVAL
from dustin_sglang.devices import to_device
from dustin_sglang.radix import advance_exact, exact_len
from dustin_sglang.tap import silenced

# Most tokens of one pass; a request's whole interval fits.
MAX_TOKENS = MAX_RECTIFY_INTERVAL


@dataclasses.dataclass(frozen=True)
class Tail:
    """Committed tokens of one request whose KV a pass rewrites.

    Attributes
    ----------
    index
        Place of the request in its batch.
    req
        SGLang's request.
    start, end
        Positions [start, end).
    """

    index: int
    req: Any
    start: int
    end: int

    @property
    def token_ids(self) -> list[int]:
        """Ids of the tokens at [start, end], one more than the positions: the draft's slot j holds token j + 1."""
        first = self.start - len(self.req.origin_input_ids)
        return list(self.req.output_ids[first : first + self.end - self.start + 1])


def due_tails(reqs: Iterable[Any], seq_lens: Iterable[int], interval: int) -> list[Tail]:
    """Choose what the next pass rewrites: `interval` tokens of each request that has as many approximate ones.

    Parameters
    ----------
    reqs, seq_lens
        The requests of a batch and their committed lengths.
    interval
        N, from 1 to `MAX_TOKENS`.

    Returns
    -------
    list of Tail
        At most `MAX_TOKENS` tokens; the requests with most approximate tokens come first, so that none waits for ever.
    """
    due: list[tuple[int, Tail]] = []
    for index, (req, seq_len) in enumerate(zip(reqs, seq_lens, strict=True)):
        start = exact_len(req, seq_len)
        last_known = len(req.origin_input_ids) + len(req.output_ids) - 1
        approximate = min(seq_len, last_known) - start
        if approximate >= interval:
            due.append((approximate, Tail(index, req, start, start + interval)))
    due.sort(key=lambda pair: -pair[0])  # a stable sort: all ranks break ties alike
    return [tail for _, tail in due[: MAX_TOKENS // interval]]


class Rectifier:
    """Runs the passes.

    Parameters
    ----------
    interval
        N, tokens rewritten at a time.
    target_worker, draft_worker
        SGLang's workers; their attention backends are tapped.
    """

    def __init__(self, interval: int, target_worker: Any, draft_worker: Any) -> None:
        self._interval = interval
        self._target, self._draft = target_worker, draft_worker

    def rectify(self, batch: Any) -> None:
        """Rewrite what is due in a decode batch, and move the exact length of its requests."""
        tails = due_tails(batch.reqs, batch.seq_lens_cpu.tolist(), self._interval)
        if not tails:
            return
        runner = self._target.model_runner
        chunk, next_tokens = prefill_batch(batch, tails)
        # The kept queries stay those of the last confirmed tokens, where a prefill would leave its own last row's.
        with silenced(runner.attn_backend, self._draft.draft_extend_attn_backend):
            mode = CaptureHiddenMode.NULL if batch.spec_algorithm.is_standalone() else CaptureHiddenMode.FULL
            forward_batch = ForwardBatch.init_new(
                chunk, runner, capture_hidden_mode=mode, return_hidden_states_before_norm=False
            )
            # Nothing is sampled, as after a verification.
            result = self._target.forward_batch_generation(None, forward_batch=forward_batch, is_verify=True)
            self._draft.rewrite(chunk, result.logits_output.hidden_states, next_tokens)
        for tail in tails:
            advance_exact(tail.req, tail.end)
        metrics.get().rectified(len(tails), len(tails) * self._interval)


def prefill_batch(batch: Any, tails: Sequence[Tail]) -> tuple[Any, torch.Tensor]:
    """A prefill batch of `tails` that writes to the KV slots which their tokens have.

    Returns
    -------
    chunk
        A `ScheduleBatch` as SGLang's prefill makes it; `batch` is left as it is.
    next_tokens : torch.Tensor
        int64 ``[len(tails)]``, the token that follows each tail.
    """
    ids = [tail.token_ids for tail in tails]
    lengths = [tail.end - tail.start for tail in tails]
    ends = [tail.end for tail in tails]
    tokens = to_device(
        [
            [token for own in ids for token in own[:-1]],
            [tail.req.req_pool_idx for tail, n in zip(tails, lengths, strict=True) for _ in range(n)],
            [position for tail in tails for position in range(tail.start, tail.end)],
        ],
        batch.device,
    )
    requests = to_device([[own[-1] for own in ids], [tail.req.req_pool_idx for tail in tails], ends], batch.device)
    inputs = batch.multimodal_inputs
    chunk = dataclasses.replace(
        batch,
        forward_mode=ForwardMode.EXTEND,
        reqs=[tail.req for tail in tails],
        input_ids=tokens[0],
        out_cache_loc=batch.req_to_token_pool.req_to_token[tokens[1], tokens[2]].long(),
        req_pool_indices=requests[1],
        seq_lens=requests[2],
        orig_seq_lens=requests[2].int(),
        seq_lens_cpu=torch.tensor(ends),
        seq_lens_sum=sum(ends),
        prefix_lens=[tail.start for tail in tails],
        extend_lens=lengths,
        extend_num_tokens=sum(lengths),
        extend_logprob_start_lens=None,
        multimodal_inputs=None if inputs is None else [inputs[tail.index] for tail in tails],
        return_logprob=False,
        top_logprobs_nums=None,
        token_ids_logprobs=None,
        has_grammar=False,
        sampling_info=None,
        spec_info=None,
        chunked_req=None,
        chunked_req_next_prompt_token=None,
    )
    return chunk, requests[0]
