"""Put the CPU attention backends, sampling and grammar masks where SGLang looks for them.

The name taken is ``torch_native``: it is what SGLang falls back to on a CPU, and it makes SGLang use its torch code
paths instead of Triton. No other backend name is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from dustin_sglang.cpu import grammar
from dustin_sglang.cpu.sampling import sample_verified

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    from dustin_sglang.cpu.attention import CpuAttnBackend

BACKEND_NAME = "torch_native"
_FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
# Where it is defined, not where it is imported: one name takes hooks only once, and `compat` needs the other.
_SAMPLE = "sglang.srt.speculative.eagle_utils.eagle_sample"
_XGRAMMAR = "sglang.srt.constrained.xgrammar_backend"
_installed = False


def install() -> None:
    """Register the backends; SGLang's plugin loader then applies the hooks. Further calls do nothing.

    Call it from the plugin in every process, only when ``SGLANG_USE_CPU_ENGINE=1``.
    """
    global _installed
    if _installed:
        return
    _installed = True
    register_attention_backend(BACKEND_NAME)(create_backend)
    HookRegistry.register(f"{_FACTORY}.create_decode_backend", _create_decode_backend, HookType.AROUND)
    HookRegistry.register(f"{_FACTORY}.create_draft_extend_backend", _create_draft_extend_backend, HookType.AROUND)
    HookRegistry.register(_SAMPLE, sample_verified, HookType.AROUND)
    HookRegistry.register(f"{_XGRAMMAR}._allocate_token_bitmask", grammar.allocate_token_bitmask, HookType.REPLACE)
    HookRegistry.register(f"{_XGRAMMAR}.XGrammarGrammar.apply_vocab_mask", grammar.apply_vocab_mask, HookType.AROUND)


def create_backend(model_runner: ModelRunner) -> CpuAttnBackend:
    """Build the backend of a target or a draft model."""
    from dustin_sglang.cpu.attention import CpuAttnBackend

    return CpuAttnBackend(model_runner)


def _create_decode_backend(original: Callable[[DraftBackendFactory], Any], factory: DraftBackendFactory) -> Any:
    """Multi-step draft backend; SGLang's own choice for other names, and where a single step needs none."""
    if factory.speculative_num_steps <= 1 or _draft_backend_name(factory, "decode") != BACKEND_NAME:
        return original(factory)
    from dustin_sglang.cpu.draft_attention import CpuMultiStepDraftBackend

    return CpuMultiStepDraftBackend(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def _create_draft_extend_backend(original: Callable[[DraftBackendFactory], Any], factory: DraftBackendFactory) -> Any:
    """Backend that writes the draft model's KV after a prefill or a verification."""
    from sglang.srt.runtime_context import get_spec

    phase = "decode" if get_spec().speculative_attention_mode == "decode" else "prefill"
    if _draft_backend_name(factory, phase) != BACKEND_NAME:
        return original(factory)
    return create_backend(factory.draft_model_runner)


def _draft_backend_name(factory: DraftBackendFactory, phase: str) -> str | None:
    """Backend that SGLang would use for the draft model, by its own order of precedence."""
    args = factory.server_args
    own = getattr(args, f"{phase}_attention_backend")
    name: str | None = args.speculative_draft_attention_backend or own or args.attention_backend
    return name
