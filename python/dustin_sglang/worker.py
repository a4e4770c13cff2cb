"""The worker: SGLang's EAGLE worker, whose verification reads a selection of the context.

One round: draft, score, select, verify, keep. Drafting and everything after the acceptance stay SGLang's. All work
is launched on the forward stream, ahead of SGLang's draft extend, so the scheduler's write-after-read barrier covers
our reads of `req_to_token`. All that is decided follows from committed lengths on the host. Where the draft does not
need them, they are asked for before the draft and awaited while it runs, so that the device does not wait for the host
at the beginning of a round.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.speculative import eagle_worker_v2, standalone_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.standalone_worker_v2 import StandaloneWorkerV2

from dustin_sglang import compat, devices, metrics
from dustin_sglang.config import DustinConfig
from dustin_sglang.draft import DustinEagleDraftWorker, DustinStandaloneDraftWorker
from dustin_sglang.monitor import Monitor
from dustin_sglang.radix import end_exact, exact_len, set_exact
from dustin_sglang.rectify import Rectifier
from dustin_sglang.selection.context import Context, score_width
from dustin_sglang.selection.selector import Selection
from dustin_sglang.wiring import Wiring, wire

logger = logging.getLogger(__name__)


class SparseVerification:
    """Mixin over an SGLang speculative worker: the five steps of the method."""

    _wiring: Wiring
    _rectifier: Rectifier | None = None
    _monitor: Monitor | None = None
    _lengths: tuple[torch.Tensor, Any] | None = None

    def init_attention_backends(self: Any) -> None:
        """Create SGLang's backends, then wire taps, signals and selection together, before graphs are captured."""
        super().init_attention_backends()  # type: ignore[misc]
        config = DustinConfig.from_env()
        self._wiring = wire(config, self._target_worker.model_runner, self._draft_worker)
        self._wiring.selector.warm_up(self.req_to_token_pool.req_to_token)
        if config.rectify_interval:
            self._rectifier = Rectifier(config.rectify_interval, self._target_worker, self._draft_worker)
        if self.topk > 1:
            compat.hook_sampling()
        if config.monitor_interval:
            self._monitor = Monitor(
                config.monitor_interval,
                config.dense_fallback,
                self._wiring.selector,
                self._target_worker,
                self.req_to_token_pool,
                self.speculative_num_draft_tokens,
            )
        if self.server_args.enable_forward_pass_metrics:  # SGLang's report of a batch takes lengths that came with it
            self._wiring.target_backend.needs_cpu_seq_lens = True
        if self._target_worker.model_runner.ps.tp_rank == 0:
            logger.info("%s", self._wiring.describe(config))
            if self.server_args.enable_metrics:
                metrics.enable()

    def forward_batch_generation(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a batch; one that (re-)enters as a prefill starts with exact KV and leaves with a list to draft over."""
        prefill = batch.forward_mode.is_extend() or batch.is_extend_in_batch
        if prefill:
            for req in batch.reqs:
                set_exact(req)
            self._wiring.selector.policy.prefilled(batch.req_pool_indices.long())
            if self._monitor is not None:
                self._monitor.tell(batch.reqs)
        elif not batch.forward_mode.is_idle():
            self._lengths = None if batch.seq_lens_cpu is not None else devices.to_host(batch.seq_lens)
            if self._rectifier is not None:
                self._rectifier.rectify(batch)
        result = super().forward_batch_generation(batch, *args, **kwargs)  # type: ignore[misc]
        if prefill and self._wiring.sparse_draft is not None and not batch.forward_mode.is_idle():
            self._select(batch, drafted=False)
        return result

    def verify(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Verify a drafted batch over its selected positions."""
        if batch.forward_mode.is_idle():
            return super().verify(batch, *args, **kwargs)  # type: ignore[misc]
        self._await_lengths(batch)
        verify_input, monitor = batch.spec_info, self._monitor
        monitored = monitor is not None and monitor.begin(batch)
        selection = self._select(batch, drafted=True, measured=monitored)
        self._end_exactness(batch, selection)
        if monitor is not None:
            selection = monitor.fall_back(batch, selection)
        self._count(batch, selection)
        if monitored:
            monitor.read_densely(batch, verify_input)
        self._wiring.target_backend.attend_to(selection)
        result = super().verify(batch, *args, **kwargs)  # type: ignore[misc]
        if monitored:
            monitor.record(batch, selection, verify_input, result.accept_lens)
        self._keep(batch, selection, verify_input, result.accept_lens)
        return result

    def _await_lengths(self: Any, batch: Any) -> None:
        """Give a batch its committed lengths on the host, which SGLang leaves out where no backend needs them."""
        if self._lengths is not None:
            batch.seq_lens_cpu, copied = self._lengths
            if copied is not None:
                copied.synchronize()

    def _select(self: Any, batch: Any, *, drafted: bool, measured: bool = False) -> Selection:
        """Select for a batch; where drafting is sparse, the next draft forwards read the same."""
        seq_lens = batch.seq_lens_cpu.tolist()
        table, width = self.req_to_token_pool.req_to_token, score_width(max(seq_lens))
        context = Context(table, batch.req_pool_indices.long(), batch.seq_lens, width)
        selection = self._wiring.selector.select(context, seq_lens, drafted=drafted, measured=measured)
        if self._wiring.sparse_draft is not None:
            self._wiring.sparse_draft.keep(selection, context.req_pool_indices, context.seq_lens)
        return selection

    def _end_exactness(self: Any, batch: Any, selection: Selection) -> None:
        """End the exactness of requests that are listed in part: if not the target, a sparse draft reads the list."""
        for req, seq_len, sparse in zip(batch.reqs, batch.seq_lens_cpu.tolist(), selection.sparse, strict=True):
            if sparse:
                end_exact(req, seq_len)

    def _count(self: Any, batch: Any, selection: Selection) -> None:
        """Count what a verification reads, and how much of its context is exact."""
        seq_lens = batch.seq_lens_cpu.tolist()
        exact = sum(exact_len(req, n) for req, n in zip(batch.reqs, seq_lens, strict=True))
        metrics.get().verified(self._wiring.selector.budget, selection, seq_lens, exact)

    def _keep(self: Any, batch: Any, selection: Selection, verify_input: Any, accept_lens: torch.Tensor) -> None:
        """Keep the target's query of each request's last confirmed token for the next round."""
        width = self.speculative_num_draft_tokens
        if self.topk == 1:
            first_rows = torch.arange(0, len(selection.sparse) * width, width, device=self.device)
            rows = first_rows + accept_lens - 1
        else:
            last = (accept_lens - 1).long().unsqueeze(1)
            rows = verify_input.dustin_accept_index.gather(1, last).squeeze(1)
        self._wiring.target_store.keep_pending(rows.long(), batch.req_pool_indices.long())

    def on_verify_complete_cpu(self: Any, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """Count acceptance where SGLang has it on the host anyway."""
        super().on_verify_complete_cpu(num_correct_drafts_per_req, batch_size)  # type: ignore[misc]
        metrics.get().accepted(sum(num_correct_drafts_per_req) + len(num_correct_drafts_per_req))


@contextlib.contextmanager
def _draft_worker_class(module: Any, name: str, replacement: type) -> Iterator[None]:
    """Let the stock constructor in `module` build our draft worker.

    SGLang names the class inside the constructor and has no factory method for it
    (patches/0.5.17/0002-draft-worker-factory.patch adds one). This is the project's only patch of a foreign module,
    and it lasts as long as the constructor runs.
    """
    original = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, original)


class DustinEagleWorker(SparseVerification, EAGLEWorkerV2):
    """EAGLE and EAGLE-3 heads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _draft_worker_class(eagle_worker_v2, "EagleDraftWorker", DustinEagleDraftWorker):
            super().__init__(*args, **kwargs)


class DustinStandaloneWorker(SparseVerification, StandaloneWorkerV2):
    """A whole small model as the draft."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with _draft_worker_class(standalone_worker_v2, "StandaloneDraftWorker", DustinStandaloneDraftWorker):
            super().__init__(*args, **kwargs)
