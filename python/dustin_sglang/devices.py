"""What differs between CUDA and the CPU: which attention backends carry the taps and the selection."""

from __future__ import annotations

from typing import Any

from dustin_sglang.config import DustinConfig


def is_cpu() -> bool:
    """Whether SGLang runs on its CPU engine in this process."""
    from sglang.srt.utils import is_cpu as sglang_is_cpu

    return bool(sglang_is_cpu())


def attention_backend() -> str:
    """Name of the attention backend that target and draft use."""
    return "torch_native" if is_cpu() else "flashinfer"


def create_target_backend(model_runner: Any) -> Any:
    """The target's attention backend, which verifies over a selection."""
    if is_cpu():
        from dustin_sglang.cpu.verify import DustinCpuBackend

        return DustinCpuBackend(model_runner)
    from dustin_sglang.selection.policies import POLICIES
    from dustin_sglang.verify_backend import DustinFlashInferBackend

    config, args, context = DustinConfig.from_env(), model_runner.server_args, model_runner.model_config.context_len
    return DustinFlashInferBackend(
        model_runner,
        list_width=context if POLICIES[config.policy].dense else min(config.budget, context),
        topk=args.speculative_eagle_topk,
        num_draft_tokens=args.speculative_num_draft_tokens,
        init_new_workspace=model_runner.init_new_workspace,
    )


def draft_backend_factory(server_args: Any, draft_runner: Any, topk: int, num_steps: int) -> Any:
    """SGLang's draft backend factory, whose backends are tapped."""
    if is_cpu():
        from dustin_sglang.cpu.verify import TappedCpuDraftBackendFactory

        return TappedCpuDraftBackendFactory(server_args, draft_runner, topk, num_steps)
    from dustin_sglang.verify_backend import TappedDraftBackendFactory

    return TappedDraftBackendFactory(server_args, draft_runner, topk, num_steps)
