"""An attention backend for SGLang on the CPU, in torch alone.

SGLang's own ``torch_native`` backend knows neither verification nor drafting, and ``intel_amx`` needs compiled
operators. This one serves every forward of a dense decoder: prefill with or without a prefix, decode, draft decode (see
`draft_attention`), draft extend and verification of chains and trees.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import pad

from dustin_sglang.cpu.segments import CausalMask, Segment, attend

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class CpuAttnBackend(AttentionBackend):
    """Dense attention over SGLang's KV pool, one request at a time.

    Each forward pass is cut into segments, one a request: which query rows, which KV slots, which mask. They are made
    once in `init_forward_metadata`; the layers only gather and attend.

    Parameters
    ----------
    model_runner : ModelRunner
        Its model must be loaded, so that layers that cannot be served are refused here and not in the middle of a run.
    """

    forward_metadata: list[Segment] | None

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        refuse_unsupported(model_runner)
        self.forward_metadata = None
        self.dtype: torch.dtype = model_runner.dtype
        # SGLang reaches both pools through the backend, also while the runner's own references change.
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.max_context_len: int = model_runner.model_config.context_len

    def support_triton(self) -> bool:
        """Keep SGLang on its torch code paths."""
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of padded requests; SGLang asks for it when it builds dummy batches, graphs or not."""
        return 1

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Cut a forward pass into segments.

        Parameters
        ----------
        forward_batch : ForwardBatch
            ``seq_lens`` counts the new tokens in every mode but TARGET_VERIFY, where it is the committed length.
        """
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = []
        elif mode.is_decode():
            self.forward_metadata = self._decode_segments(forward_batch)
        elif mode.is_target_verify():
            self.forward_metadata = self._verify_segments(forward_batch, self.committed_slots(forward_batch))
        elif mode.is_context_parallel_extend(include_draft_extend_v2=True):
            self.forward_metadata = self._extend_segments(forward_batch, self.committed_slots(forward_batch))
        else:
            raise NotImplementedError(f"the CPU attention backend does not run {mode.name} batches")

    def layer_segments(self, layer_id: int) -> list[Segment]:
        """What one layer attends to; a sparse backend overrides this."""
        return self.forward_metadata or []

    def committed_slots(self, forward_batch: ForwardBatch) -> list[torch.Tensor]:
        """KV slots of the first ``seq_len`` positions of each request, int64 ``[seq_len_b]``."""
        req_to_token = self.req_to_token_pool.req_to_token
        pool_indices, seq_lens = forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()
        return [req_to_token[r, :n].long() for r, n in zip(pool_indices, seq_lens, strict=True)]

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of any batch with more than one row a request: prefill, verification, draft extend.

        Parameters
        ----------
        q : Tensor ``[tokens, q_heads * head_dim]``
        k, v : Tensor ``[tokens, kv_heads, head_dim]`` or None
            New keys and values, written to the pool first; None if another layer wrote them.
        layer : RadixAttention
        forward_batch : ForwardBatch

        Returns
        -------
        Tensor ``[tokens, q_heads * v_head_dim]``
        """
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attention of a decode batch; parameters as in `forward_extend`."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool,
        extra: dict[str, Any],
    ) -> torch.Tensor:
        unknown = [name for name, value in extra.items() if value is not None]
        if unknown:
            raise NotImplementedError(f"the CPU attention backend does not implement {', '.join(unknown)}")
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        k_cache = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        v_cache = self.token_to_kv_pool.get_value_buffer(layer.layer_id)

        segments = self.layer_segments(layer.layer_id)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if query.shape[0] != sum(segment.num_rows for segment in segments):
            raise RuntimeError(f"{query.shape[0]} query rows do not match the batch that attention was prepared for")
        out = query.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for segment in segments:
            out[segment.rows] = attend(query[segment.rows], k_cache, v_cache, segment, layer.scaling)
        return out.view(query.shape[0], -1)

    def _decode_segments(self, forward_batch: ForwardBatch) -> list[Segment]:
        return [Segment(slice(b, b + 1), slots) for b, slots in enumerate(self.committed_slots(forward_batch))]

    def _extend_segments(self, forward_batch: ForwardBatch, slots: list[torch.Tensor]) -> list[Segment]:
        lengths = forward_batch.extend_seq_lens.tolist()
        mask = CausalMask(max(lengths), max(s.numel() for s in slots), self.dtype)
        stops = itertools.accumulate(lengths)
        return [
            Segment(slice(stop - length, stop), own, mask)
            for own, length, stop in zip(slots, lengths, stops, strict=True)
        ]

    def _verify_segments(self, forward_batch: ForwardBatch, contexts: list[torch.Tensor]) -> list[Segment]:
        """Segments of a verification over these context slots, int64 ``[kv_b]`` a request; the draft's follow them."""
        spec_info = forward_batch.spec_info
        g = spec_info.draft_token_num
        drafts = forward_batch.out_cache_loc.long().view(-1, g)
        slots = [torch.cat([context, own]) for context, own in zip(contexts, drafts, strict=True)]
        trees = tree_masks(spec_info.custom_mask, len(contexts), g, self.dtype)
        masks: Sequence[torch.Tensor | CausalMask]
        if trees is None:
            masks = [CausalMask(g, max(s.numel() for s in slots), self.dtype)] * len(slots)
        else:
            masks = [pad(tree, (context.numel(), 0)) for tree, context in zip(trees, contexts, strict=True)]
        return [Segment(slice(b * g, (b + 1) * g), *parts) for b, parts in enumerate(zip(slots, masks, strict=True))]


def tree_masks(
    custom_mask: torch.Tensor | None, batch_size: int, num_draft_tokens: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Additive masks among the draft tokens of each request.

    Parameters
    ----------
    custom_mask : Tensor, bool, flat ``[bs * g * g]`` or None
        SGLang's QLEN_ONLY mask, which is what it builds on the CPU. None or empty: the draft is a chain.

    Returns
    -------
    Tensor ``[bs, g, g]`` or None
        0 where a row may attend, ``-inf`` elsewhere; None for a chain.
    """
    if custom_mask is None or custom_mask.numel() == 0:
        return None
    g = num_draft_tokens
    if custom_mask.numel() != batch_size * g * g:
        raise ValueError(
            f"verification mask has {custom_mask.numel()} elements, not {batch_size} x {g} x {g}: the CPU attention "
            "backend takes masks among the draft tokens (QLEN_ONLY), not over the context"
        )
    visible = custom_mask.view(batch_size, g, g).bool()
    return torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))


def refuse_unsupported(model_runner: ModelRunner) -> None:
    """Raise for a model or an option that would give wrong results.

    Raises
    ------
    NotImplementedError
        Naming the first feature that is not supported.
    """
    config = model_runner.model_config
    reason = None
    if model_runner.use_mla_backend:
        reason = "multi-head latent attention"
    elif config.is_encoder_decoder:
        reason = "encoder-decoder models"
    elif model_runner.kv_cache_dtype != model_runner.dtype:
        reason = f"a KV cache of {model_runner.kv_cache_dtype} under a model of {model_runner.dtype}"
    elif model_runner.server_args.enable_torch_compile:
        reason = "--enable-torch-compile"
    else:
        layers = [m for m in model_runner.model.modules() if isinstance(m, RadixAttention)]
        reason = next((found for layer in layers if (found := _unsupported_layer(layer))), None)
    if reason:
        raise NotImplementedError(f"dustin-sglang's CPU attention backend does not support {reason}")


def _unsupported_layer(layer: RadixAttention) -> str | None:
    """What makes a layer more than dense causal attention, or None."""
    features = {
        "cross attention": layer.is_cross_attention,
        f"{layer.attn_type.value} attention": layer.attn_type != AttentionType.DECODER,
        "sliding windows": layer.sliding_window_size > -1,
        "logit soft caps": layer.logit_cap > 0,
        "attention temperature scaling": layer.xai_temperature_len > 0,
    }
    name = next((feature for feature, present in features.items() if present), None)
    return name and f"{name} (layer {layer.layer_id})"
