"""The draft worker: SGLang's own, with attention backends that copy the lookahead queries.

`TappedDraft` is mixed over `EagleDraftWorker` and over `StandaloneDraftWorker`. It changes no result of the draft,
unless ``--dustin-sparse-draft`` makes it read less.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker

from dustin_sglang import devices
from dustin_sglang.selection.state import QueryStore
from dustin_sglang.sparse_draft import SparseDraft


class TappedDraft:
    """Mixin over an SGLang draft worker: its attention backends are tapped.

    Attributes
    ----------
    store
        Where the queries go; bound by the worker when the scoring heads are known.
    """

    store: QueryStore | None = None

    def init_attention_backend(self: Any) -> None:
        """Create the draft's attention backends, tapped; otherwise as SGLang does."""
        factory = devices.draft_backend_factory(
            self.server_args, self.draft_runner, self.topk, self.speculative_num_steps
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
