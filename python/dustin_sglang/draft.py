"""The draft worker: SGLang's own, with attention backends that copy the lookahead queries.

`TappedDraft` is mixed over `EagleDraftWorker` and over `StandaloneDraftWorker`. It changes no result of the draft,
unless ``--dustin-sparse-draft`` makes it read less.

SGLang never feeds the last drafted token back to the draft, so its query would be missing among those that look ahead,
though the target verifies its row. A whole-model draft that drafts chains takes one step more for it
(``--dustin-extra-step``), inside the same CUDA graph; what that step would draft is thrown away, and the KV that it
writes lies in a slot of the round, which the round's draft extend writes again.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.eagle_utils import per_step_draft_out_cache_loc
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker

from dustin_sglang import devices
from dustin_sglang.config import DustinConfig
from dustin_sglang.selection.policies import POLICIES
from dustin_sglang.selection.state import QueryStore
from dustin_sglang.sparse_draft import SparseDraft


class TappedDraft:
    """Mixin over an SGLang draft worker: its attention backends are tapped.

    Attributes
    ----------
    store
        Where the queries go; bound by the worker when the scoring heads are known.
    extra_step
        Whether a round takes one decode step more, for the query of its last token.
    """

    store: QueryStore | None = None
    extra_step: bool = False

    @property
    def decode_forwards(self: Any) -> int:
        """Decode forwards of a round, each of which leaves a query for every branch."""
        return int(self.speculative_num_steps) - 1 + self.extra_step

    def init_attention_backend(self: Any) -> None:
        """Create the draft's attention backends, tapped; otherwise as SGLang does."""
        config = DustinConfig.from_env()
        wanted = config.extra_step == "auto" and POLICIES[config.policy].uses_lookahead
        self.extra_step = wanted and self._can_step_further()
        # SGLang makes one backend fewer than steps.
        factory = devices.draft_backend_factory(
            self.server_args, self.draft_runner, self.topk, self.decode_forwards + 1
        )
        self.draft_attn_backend = factory.create_decode_backend()
        self.draft_extend_attn_backend = factory.create_draft_extend_backend()
        self.draft_runner.draft_attn_backend = self.draft_attn_backend
        self.draft_runner.attn_backend = self.draft_extend_attn_backend

    def bind(self: Any, store: QueryStore, sparse: SparseDraft | None) -> None:
        """Let the taps write to `store` and the draft read the lists of `sparse`; before CUDA graphs are captured."""
        self.store = store
        self.draft_extend_attn_backend.store, self.draft_extend_attn_backend.sparse = store, sparse
        self.draft_attn_backend.sparse = sparse
        for step, backend in enumerate(self.draft_attn_backend.attn_backends):
            backend.store, backend.step = store, step
            backend.sparse = sparse

    def _can_step_further(self) -> bool:
        return False

    def rewrite(self: Any, chunk: Any, hidden_states: torch.Tensor | None, next_tokens: torch.Tensor) -> None:
        """Write the draft's KV of a prefill batch again, as SGLang's draft prefill does; what it would draft is lost.

        Parameters
        ----------
        chunk
            The batch that the target has just run.
        hidden_states
            The target's, ``[tokens, width]``; None for a whole-model draft.
        next_tokens
            int64 ``[requests]``, the token after each request's last.
        """
        with (
            self.draft_tp_context(self.draft_runner.tp_group),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            self._draft_extend_for_prefill(chunk, hidden_states, next_tokens)

    def _draft_extend_for_decode(self: Any, batch: Any, batch_result: Any) -> None:
        super()._draft_extend_for_decode(batch, batch_result)  # type: ignore[misc]
        width = self.speculative_num_draft_tokens
        first_rows = torch.arange(0, len(batch.seq_lens) * width, width, device=self.device)
        self.store.keep_pending(first_rows + batch_result.accept_lens - 1, batch.req_pool_indices)


class DustinEagleDraftWorker(TappedDraft, EagleDraftWorker):
    """An EAGLE or EAGLE-3 head as the draft."""


class DustinStandaloneDraftWorker(TappedDraft, StandaloneDraftWorker):
    """A whole small model as the draft."""

    def _can_step_further(self: Any) -> bool:
        # In a tree the tokens of the last step are known only after SGLang has ranked all branches.
        return int(self.topk) == 1

    def draft_forward(self, forward_batch: Any) -> Any:
        """Draft as SGLang does; then let the last token look ahead, with the positions that SGLang left."""
        slots = forward_batch.out_cache_loc
        drafted = super().draft_forward(forward_batch)
        if self.extra_step:
            last = self.speculative_num_steps - 1
            forward_batch.input_ids = drafted[2][:, -1]
            forward_batch.out_cache_loc = per_step_draft_out_cache_loc(
                slots, forward_batch.batch_size, self.topk, self.speculative_num_steps
            )[last]
            with forward_context(ForwardContext(attn_backend=self.draft_attn_backend.attn_backends[last])):
                self._run_body(forward_batch)
        return drafted

    @torch.no_grad()
    def _run_body(self: Any, forward_batch: Any) -> None:
        """Run the draft without its head, whose logits nobody reads, where SGLang's model lets us."""
        body = getattr(self.draft_runner.model, "model", None)
        inputs = ("input_ids", "positions", "forward_batch")
        if body is None or not set(inputs) <= set(inspect.signature(body.forward).parameters):
            self.draft_runner.forward(forward_batch)
            return
        body(**{name: getattr(forward_batch, name) for name in inputs[:2]}, forward_batch=forward_batch)
