"""The monitor: every N verifications the same rows are also read densely, and the two answers compared.

The dense forward comes first. The sparse one then writes its own K, V and queries over those of the dense one, so a
monitored verification decides and leaves behind exactly what an unmonitored one does.

Both read the same KV, of which a part may be approximate: agreement says what the list costs at this step, not how far
the request has drifted from dense decoding.

Results travel to the host behind the verification and are read at the next one, when SGLang has waited for the former
anyway to learn committed lengths. So nothing synchronises, and all ranks learn them in the same round.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from typing import Any

import torch
from sglang.srt.speculative.eagle_utils import eagle_prepare_for_verify

from dustin_sglang import compat, metrics
from dustin_sglang.devices import to_host
from dustin_sglang.selection.selector import Selection, Selector

logger = logging.getLogger(__name__)

# Compared tokens that count as recent; a request is judged when it has as many.
RECENT_TOKENS = 16
_STATE = "dustin_monitored"
_COMPARE_ROWS = 64  # rows of logits compared at a time: a vocabulary in float32 is large


class Agreement:
    """How often the sparse greedy token of one request was the dense one, and whether that ended sparse reading.

    Attributes
    ----------
    dense
        Verification of this request reads everything.
    """

    def __init__(self) -> None:
        self.dense = False
        self._steps: deque[tuple[float, int]] = deque()
        self._rows = 0

    def add(self, agreeing: float, rows: int) -> None:
        """Count `rows` compared tokens, of which `agreeing` agree; older ones than the recent are forgotten."""
        self._steps.append((agreeing, rows))
        self._rows += rows
        while self._rows - self._steps[0][1] >= RECENT_TOKENS:
            self._rows -= self._steps.popleft()[1]

    @property
    def complete(self) -> bool:
        """Whether enough tokens were compared to judge."""
        return self._rows >= RECENT_TOKENS

    @property
    def share(self) -> float | None:
        """Recent agreement from 0 to 1; None before the first comparison."""
        return sum(agreeing for agreeing, _ in self._steps) / self._rows if self._rows else None


def agreement_of(req: Any) -> Agreement:
    """The agreement kept with SGLang's request."""
    state: Agreement | None = getattr(req, _STATE, None)
    if state is None:
        state = Agreement()
        setattr(req, _STATE, state)
    return state


def compare_rows(dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
    """Compare logits ``[rows, vocabulary]``.

    Returns
    -------
    torch.Tensor
        float32 ``[rows, 2]``: 1 where the greedy token is the same, and KL(dense || sparse) in nats.
    """
    results = []
    for p, q in zip(dense.split(_COMPARE_ROWS), sparse.split(_COMPARE_ROWS), strict=True):
        same = (p.argmax(-1) == q.argmax(-1)).float()
        log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
        results.append(torch.stack([same, (log_p.exp() * (log_p - log_q)).sum(-1)], dim=1))
    return torch.cat(results)


@dataclasses.dataclass
class _Pending:
    """Results on their way to the host.

    Attributes
    ----------
    reqs, sparse
        The requests of the batch, and whether each was read in part.
    host
        float32 ``[batch, 3 + shares]``: agreeing and compared tokens of each request, the sum of their KL, and the
        `shares` by name, in order.
    copied
        Event behind the copy; None on the CPU.
    """

    reqs: list[Any]
    sparse: list[bool]
    shares: list[str]
    host: torch.Tensor
    copied: Any


class Monitor:
    """Runs the dense forwards, keeps the agreement of each request and makes it known.

    Parameters
    ----------
    interval
        N, sparse verifications from one monitored one to the next.
    fallback
        Recent agreement below which a request is verified densely from then on; 0 never does.
    selector
        Says which requests are read in part.
    target_worker, req_to_token_pool
        SGLang's.
    num_draft_tokens
        g, the tokens under verification.
    """

    def __init__(
        self,
        interval: int,
        fallback: float,
        selector: Selector,
        target_worker: Any,
        req_to_token_pool: Any,
        num_draft_tokens: int,
    ) -> None:
        self._interval, self._fallback, self._selector, self._g = interval, fallback, selector, num_draft_tokens
        self._target, self._pool = target_worker, req_to_token_pool
        self._rank, self._ranks, self._reduce = compat.tensor_parallel(target_worker.model_runner)
        self._sparse_steps = 0
        self._pending: _Pending | None = None
        self._rows: torch.Tensor | None = None
        compat.hook_sampling()

    def begin(self, batch: Any) -> bool:
        """Take in what the last monitored verification showed; whether the coming one is to be monitored."""
        self._collect()
        self.tell(batch.reqs)
        seq_lens = batch.seq_lens_cpu.tolist()
        if not any(self._is_sparse(req, n) for req, n in zip(batch.reqs, seq_lens, strict=True)):
            return False
        self._sparse_steps += 1
        return self._sparse_steps % self._interval == 0

    def tell(self, reqs: list[Any]) -> None:
        """Let the tokens that `reqs` are to get carry what is known of them; before a prefill and a verification."""
        for req in reqs:
            tell(req, 2 * self._g)

    def fall_back(self, batch: Any, selection: Selection) -> Selection:
        """List everything for the requests of `batch` that are verified densely by now."""
        rows = [i for i, req in enumerate(batch.reqs) if selection.sparse[i] and agreement_of(req).dense]
        return selection.whole(rows, batch.seq_lens_cpu.tolist()) if rows else selection

    def read_densely(self, batch: Any, verify_input: Any) -> None:
        """Run the rows of a drafted batch over everything; `verify_input` compares its own before it samples."""
        runner, lens = self._target.model_runner, batch.seq_lens_cpu.tolist()
        runner.attn_backend.attend_to(Selection(None, lens, [False] * len(lens)))
        # A captured verification has no room for whole contexts.
        graphs, runner.decode_cuda_graph_runner = runner.decode_cuda_graph_runner, None
        try:
            copy = dataclasses.replace(batch)
            forward_batch, _ = eagle_prepare_for_verify(verify_input, self._pool, copy, self._target)
            result = self._target.forward_batch_generation(None, forward_batch=forward_batch, is_verify=True)
        finally:
            runner.decode_cuda_graph_runner = graphs
        dense = result.logits_output.next_token_logits

        def compare(sparse: torch.Tensor) -> None:
            self._rows = compare_rows(dense, sparse)

        verify_input.dustin_observe_logits = compare

    def record(self, batch: Any, selection: Selection, verify_input: Any, accept_lens: torch.Tensor) -> None:
        """Send to the host what a monitored verification showed on the rows whose next token was accepted."""
        if self._rows is None:
            raise RuntimeError("a monitored verification sampled without comparing its logits")
        index = verify_input.dustin_accept_index.long().clamp(min=0)
        accepted = torch.arange(index.shape[1], device=index.device) < accept_lens.unsqueeze(1)
        rows = (self._rows[index] * accepted.unsqueeze(2)).sum(1)
        shares = {} if selection.measures is None else selection.measures.present()
        results = torch.stack([rows[:, 0], accept_lens.float(), rows[:, 1], *shares.values()], dim=1)
        if self._reduce is not None:  # ranks must agree to the bit on what they decide from
            results = self._reduce(results) / self._ranks
        self._pending = _Pending(list(batch.reqs), selection.sparse, list(shares), *to_host(results))
        self._rows = None

    def _is_sparse(self, req: Any, seq_len: int) -> bool:
        return self._selector.is_sparse(seq_len) and not agreement_of(req).dense

    def _collect(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.copied is not None:
            pending.copied.synchronize()  # returns at once: the host has waited for the lengths that came after it
        for req, sparse, result in zip(pending.reqs, pending.sparse, pending.host.tolist(), strict=True):
            if sparse:
                agreeing, compared, kl, *shares = result
                self._take_in(req, agreeing, compared, kl, dict(zip(pending.shares, shares, strict=True)))

    def _take_in(self, req: Any, agreeing: float, compared: float, kl: float, shares: dict[str, float]) -> None:
        metrics.get().monitored(agreeing, compared, kl, shares)
        state = agreement_of(req)
        state.add(agreeing, round(compared))
        share = state.share
        if state.dense or not state.complete or share is None or share >= self._fallback:
            return
        state.dense = True
        metrics.get().fell_back()
        if self._rank == 0:
            logger.warning(
                "dustin: request %s is verified densely from now on: its recent agreement is %.2f, below "
                "--dustin-dense-fallback %g",
                req.rid,
                share,
                self._fallback,
            )


def tell(req: Any, ahead: int) -> None:
    """Let the tokens of a request that are still to come carry its agreement in `meta_info`.

    SGLang answers with one entry a token of each list in `customized_info`. Entries of tokens that it may have sent
    stay as they are; `ahead` new ones cover what rounds under way can add.
    """
    state = agreement_of(req)
    if req.customized_info is None:
        req.customized_info = {}
    sent = len(req.output_ids)
    for name, value in (("dustin_agreement", state.share), ("dustin_dense", state.dense)):
        entries = req.customized_info.setdefault(name, [])
        del entries[sent:]
        entries.extend([value] * (sent + ahead - len(entries)))
