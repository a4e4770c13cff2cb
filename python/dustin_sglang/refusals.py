"""What is refused at start-up, each with what to do instead. Nothing here is ever half-working."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dustin_sglang import compat, devices
from dustin_sglang.config import DustinConfig
from dustin_sglang.draft_files import draft_faults
from dustin_sglang.draft_kind import DraftKind, draft_config


class Refused(ValueError):
    """A combination that dustin does not support."""


def refuse_unsupported(server_args: Any, kind: DraftKind) -> None:
    """Check the arguments and the two models' configs.

    Raises
    ------
    Refused
        The first thing that is not supported and what to do instead.
    """
    for reason in _reasons(compat.resolved(server_args), server_args, kind):
        raise Refused(f"--speculative-algorithm dustin: {reason}")


def _reasons(view: Any, server_args: Any, kind: DraftKind) -> Iterator[str]:
    yield from _parallelism(view)
    yield from _memory(view)
    yield from _speculation(view)
    yield from _backends(view, server_args)
    yield from _models(server_args, kind)
    yield from _draft_files(server_args)


def _parallelism(view: Any) -> Iterator[str]:
    if view.pp_size > 1:
        yield "pipeline parallelism (--pp-size) is not supported; use --tp-size"
    if view.enable_dp_attention:
        yield "DP attention (--enable-dp-attention) is not supported; use --tp-size"
    if view.dcp_size > 1 or view.attn_cp_size > 1 or view.enable_prefill_cp or view.enable_dsa_prefill_context_parallel:
        yield "context parallelism is not supported; use --tp-size"
    if view.disaggregation_mode != "null":
        yield "prefill-decode disaggregation (--disaggregation-mode) is not supported; serve both on one engine"
    if view.enable_two_batch_overlap or view.enable_single_batch_overlap:
        yield "two-batch and single-batch overlap are not supported; remove --enable-two/single-batch-overlap"
    if view.enable_pdmux:
        yield "PD multiplexing (--enable-pdmux) is not supported; remove the flag"
    if view.smg_grpc_mode or view.grpc_mode:
        yield "the legacy gRPC server (--smg-grpc-mode) is not supported: it checks no request; use HTTP or --grpc-port"
    if compat.rust_server_requested():
        yield "SGLANG_RUST_SERVER is not supported: it does not check requests; unset it"
    if view.tokenizer_worker_num > 1:
        yield (
            "--tokenizer-worker-num above 1 is not supported: SGLang does not load plugins in those processes; use 1"
        )


def _memory(view: Any) -> Iterator[str]:
    if view.enable_hierarchical_cache or view.enable_lmcache or view.enable_flexkv:
        yield "a hierarchical or external KV cache is not supported; remove its flag"
    if view.enable_hisparse:
        yield "HiSparse (--enable-hisparse) is not supported; it is sparse attention of another kind"
    if view.enable_unified_memory:
        yield "the unified memory pool (--enable-unified-memory) is not supported; remove the flag"
    if view.enable_streaming_session or view.enable_session_radix_cache:
        yield "streaming sessions and the session radix cache are not supported; remove the flag"
    if (name := compat.unified_or_cpp_radix_tree()) is not None:
        yield f"the C++ and unified radix trees are not supported; unset {name}"
    if view.radix_cache_backend not in (None, "dustin"):
        yield f"it selects its own radix cache; remove --radix-cache-backend {view.radix_cache_backend}"
    if "fp" in view.kv_cache_dtype:
        yield (
            f"--kv-cache-dtype {view.kv_cache_dtype} is not supported: scoring reads keys of the model's own type; "
            "use auto"
        )


def _speculation(view: Any) -> Iterator[str]:
    if view.speculative_adaptive:
        yield "adaptive speculation (--speculative-adaptive) is not supported; fix --speculative-num-steps"
    if view.speculative_use_rejection_sampling:
        yield "--speculative-use-rejection-sampling is not supported; remove the flag"
    thresholds = (view.speculative_accept_threshold_single, view.speculative_accept_threshold_acc)
    if view.device == "cpu" and thresholds != (1.0, 1.0):
        yield "--speculative-accept-threshold-single and -acc are for GPUs: the CPU would ignore them; remove them"
    if view.enable_multi_layer_eagle:
        yield "multi-layer EAGLE and multi-token-prediction drafts are not supported; use one EAGLE head or a model"
    if view.speculative_attention_mode == "decode":
        yield "--speculative-attention-mode decode is not supported: verification runs as a prefill; use prefill"
    if view.speculative_draft_window_size is not None:
        yield "--speculative-draft-window-size is not supported: lookahead reads the draft's whole KV; remove the flag"
    if view.decoupled_spec_role not in (None, "null"):
        yield "decoupled speculation is not supported; remove --decoupled-spec-*"
    if view.enable_lora or view.lora_paths:
        yield "LoRA is not supported; merge the adapter into the model"
    if view.enable_deterministic_inference:
        yield "--enable-deterministic-inference is not supported: its kernels do not take a selected list"
    if view.dllm_algorithm is not None:
        yield "diffusion language models are not supported"
    if compat.plan_stream_requested():
        yield "SGLANG_ENABLE_OVERLAP_PLAN_STREAM is not supported: the list is known only after drafting; unset it"


def _backends(view: Any, server_args: Any) -> Iterator[str]:
    ours = devices.attention_backend()
    # On the CPU SGLang writes its own default into the argument before anybody can see what the user gave.
    allowed = (None, ours, "intel_amx") if server_args.device == "cpu" else (None, ours)
    for name in (
        "attention_backend",
        "prefill_attention_backend",
        "decode_attention_backend",
        "speculative_draft_attention_backend",
    ):
        value = getattr(server_args, name)
        if value not in allowed:
            flag = "--" + name.replace("_", "-")
            yield f"it runs through {ours}; remove {flag} {value}, or give {flag} {ours}"
    if server_args.device not in ("cuda", "cpu"):
        yield f"device {server_args.device} is not supported; use cuda or cpu"
    if view.cuda_graph_config.prefill.backend == "full":
        yield (
            "full CUDA graphs for prefill are not supported: the prefill leaves a query for the first verification; "
            "use --cuda-graph-backend-prefill breakable or disabled"
        )


def _models(server_args: Any, kind: DraftKind) -> Iterator[str]:
    target, draft = server_args.get_model_config(), draft_config(server_args)
    for role, config in (("target", target), ("draft", draft)):
        if config.attention_arch.name != "MHA":
            yield f"the {role} uses {config.attention_arch.name} attention; only MHA and GQA models are supported"
        if config.is_hybrid_swa or config.sliding_window_size is not None:
            yield f"the {role} uses sliding-window attention, which is not supported"
        if config.is_encoder_decoder:
            yield f"the {role} uses cross-attention, which is not supported"
        if compat.has_recurrent_layers(config):
            yield f"the {role} has recurrent or linear-attention layers, which are not supported"
    context = server_args.context_length or target.context_len
    if draft.context_len < context and not compat.longer_context_allowed():
        yield (
            f"the draft's context of {draft.context_len} tokens is shorter than the target's {context}; give "
            f"--context-length {draft.context_len}, use a longer draft, or set "
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1 if the draft extrapolates"
        )
    layers, groups = target.num_attention_layers, DustinConfig.from_env().layer_groups
    if groups and groups > layers:
        yield (
            f"--dustin-layer-groups (or DUSTIN_LAYER_GROUPS) is {groups}, but the target has {layers} layers; give a "
            f"number from 1 to {layers}"
        )
    if kind is not DraftKind.STANDALONE:
        made_for = getattr(draft.hf_config, "target_hidden_size", None) or draft.hidden_size
        if made_for != target.hidden_size:
            yield (
                f"the head takes hidden states of {made_for}, but the target's have {target.hidden_size}; use a head "
                "that was trained for this target"
            )
    if kind is not DraftKind.EAGLE3 and draft.vocab_size != target.vocab_size:
        yield (
            f"the draft's vocabulary of {draft.vocab_size} tokens is not the target's of {target.vocab_size}; use a "
            "draft of the same family, or `python -m dustin_sglang.make_draft`"
        )


def _draft_files(server_args: Any) -> Iterator[str]:
    draft = draft_config(server_args)
    path = server_args.speculative_draft_model_path
    load_format = server_args.speculative_draft_load_format or server_args.load_format
    quantised = getattr(draft.hf_config, "quantization_config", None) is not None
    yield from draft_faults(path, str(load_format), draft.num_hidden_layers, quantised)
