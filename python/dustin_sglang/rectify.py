"""Rectification: a dense pass over committed tokens replaces KV that sparse verification left approximate.

Such a pass is a prefill chunk whose KV slots exist already. The target reads everything before the chunk and writes its
keys and values in place; the draft follows with the same tokens shifted by one and the target's hidden states. What it
writes is what a fresh prefill would write, so `exact_len` moves to the chunk's end.

It runs at the beginning of a round, before the draft, over tokens whose ids the host knows. Under overlap scheduling
these end one round before the committed length, which a pass does not need: it is launched while the device is at the
round before. At most one pass runs between two verifications, and what it reads and writes is bounded (`MAX_TOKENS`,
`MAX_READS`), which bounds what the other requests wait for it; a longer interval is rewritten in consecutive rounds.
Every decision follows from numbers of the host that all tensor-parallel ranks share.

A request is due by its own tokens alone, and takes pieces by its own length. If others went along there would be fewer
passes, but what a request answers would then depend on how much its neighbours accept. It does where more is due than
a pass takes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from dustin_sglang import metrics
from dustin_sglang.devices import to_device
from dustin_sglang.radix import advance_exact, exact_len, rewritten_len
from dustin_sglang.tap import silenced

# Most tokens of one pass, or half as many again as the verification has rows, if these are more: about up to here the
# weights that a forward reads take longer than its products.
MAX_TOKENS = 128
# Most tokens of one pass times the context that each attends to (docs/architecture.md, "Rectification", has the times).
MAX_READS = 2**21


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


def due_tails(reqs: Sequence[Any], interval: int, rows: int = 0) -> list[Tail]:
    """Choose what the next pass rewrites: of each request with `interval` approximate tokens as many, or a piece.

    A request whose interval has been rewritten in part is due until the rest is.

    Parameters
    ----------
    reqs
        The requests of a batch.
    interval
        N, at least 1.
    rows
        Rows of the batch's verification.

    Returns
    -------
    list of Tail
        At most `MAX_TOKENS` tokens, or 3/2 of `rows`, which attend to `MAX_READS` positions, but one token at least.
        The requests with most approximate tokens come first, so that none waits for ever.
    """
    due: list[tuple[int, Tail]] = []
    for index, req in enumerate(reqs):
        known = len(req.origin_input_ids) + len(req.output_ids) - 1  # committed tokens; the last has no KV yet
        start = exact_len(req, known)
        approximate = known - start
        left = interval - rewritten_len(req) % interval if approximate > 0 else interval
        if approximate >= left:
            most = max(1, min(MAX_TOKENS, MAX_READS // (start + MAX_TOKENS)))
            pieces = -(-left // most)
            due.append((approximate, Tail(index, req, start, start - (-left // pieces))))
    due.sort(key=lambda pair: -pair[0])  # a stable sort: all ranks break ties alike
    return list(_fitting((tail for _, tail in due), max(3 * rows // 2, MAX_TOKENS)))


def _fitting(tails: Iterable[Tail], most_tokens: int) -> Iterator[Tail]:
    """Yield tails until a pass is full; the first always fits."""
    tokens, reads = 0, 0
    for tail in tails:
        length = tail.end - tail.start
        tokens, reads = tokens + length, reads + length * tail.end
        if tokens > length and (tokens > most_tokens or reads > MAX_READS):
            return
        yield tail


class Rectifier:
    """Runs the passes.

    Parameters
    ----------
    interval
        N, approximate tokens after which they are rewritten.
    target_worker, draft_worker
        SGLang's workers; their attention backends are tapped.
    """

    def __init__(self, interval: int, target_worker: Any, draft_worker: Any) -> None:
        self._interval, self._width = interval, draft_worker.speculative_num_draft_tokens
        self._target, self._draft = target_worker, draft_worker

    def rectify(self, batch: Any) -> None:
        """Rewrite what is due in a decode batch, and move the exact length of its requests."""
        rows = len(batch.reqs) * self._width
        tails = due_tails(batch.reqs, self._interval, rows)
        if not tails:
            return
        runner = self._target.model_runner
        chunk, next_tokens = prefill_batch(batch, tails)
        with _rewriting(runner.attn_backend, self._draft.draft_extend_attn_backend):
            mode = CaptureHiddenMode.NULL if batch.spec_algorithm.is_standalone() else CaptureHiddenMode.FULL
            forward_batch = ForwardBatch.init_new(
                chunk, runner, capture_hidden_mode=mode, return_hidden_states_before_norm=False
            )
            # Nothing is sampled, as after a verification.
            result = self._target.forward_batch_generation(None, forward_batch=forward_batch, is_verify=True)
            self._draft.rewrite(chunk, result.logits_output.hidden_states, next_tokens)
        for tail in tails:
            advance_exact(tail.req, tail.end)
        metrics.get().rectified(len(tails), sum(tail.end - tail.start for tail in tails))


@contextlib.contextmanager
def _rewriting(*backends: Any) -> Iterator[None]:
    """Let the attention backends of a pass plan from the host, where they plan (`rewriting.py`), and record nothing.

    The kept queries stay those of the last confirmed tokens, where a prefill would leave its own last row's.
    """
    with contextlib.ExitStack() as stack:
        for backend in backends:
            stack.enter_context(getattr(backend, "rewriting", contextlib.nullcontext)())
        stack.enter_context(silenced(*backends))
        yield


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
