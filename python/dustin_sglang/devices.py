"""What differs between CUDA and the CPU: which attention backends carry the taps and the selection."""

from __future__ import annotations

from typing import Any

import torch

from dustin_kernels.attend import MAX_TREE_ROWS
from dustin_sglang.config import ConfigError, DustinConfig
from dustin_sglang.grouping import count_groups
from dustin_sglang.selection.layer_groups import LayerGroups

MAX_HEAD_DIM = 256  # of dustin_kernels.attend_slots


def is_cpu() -> bool:
    """Whether SGLang runs on its CPU engine in this process."""
    from sglang.srt.utils import is_cpu as sglang_is_cpu

    return bool(sglang_is_cpu())


def to_device(rows: list[list[int]], device: Any) -> torch.Tensor:
    """Copy int64 rows of one length without waiting for the device."""
    pinned = str(device).startswith("cuda")
    return torch.tensor(rows, dtype=torch.int64, pin_memory=pinned).to(device, non_blocking=True)


def to_host(values: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Copy without waiting; the copy and the event behind it, None on the CPU."""
    if not values.is_cuda:
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied


def attention_backend() -> str:
    """Name of the attention backend that target and draft use."""
    return "torch_native" if is_cpu() else "flashinfer"


def create_target_backend(model_runner: Any) -> Any:
    """The target's attention backend, which verifies over a selection."""
    config, args, context = DustinConfig.from_env(), model_runner.server_args, model_runner.model_config.context_len
    paths = {"draft": args.speculative_draft_model_path, "target": args.model_path}
    groups = LayerGroups(model_runner.model_config.num_attention_layers, count_groups(config, paths))
    if is_cpu():
        from dustin_sglang.cpu.verify import DustinCpuBackend

        return DustinCpuBackend(model_runner, groups)
    from dustin_sglang.selection.policies import POLICIES

    dense = POLICIES[config.policy].dense
    # With overlap scheduling the round after a request's last one lists what that one committed beyond the context.
    whole = context + args.speculative_num_draft_tokens
    return _verify_backend_class(config, model_runner, dense)(
        model_runner,
        groups=groups,
        list_width=whole if dense or config.dense_fallback else min(config.budget, context),
        topk=args.speculative_eagle_topk,
        num_draft_tokens=args.speculative_num_draft_tokens,
        init_new_workspace=model_runner.init_new_workspace,
    )


def _verify_backend_class(config: DustinConfig, model_runner: Any, dense: bool) -> Any:
    """The backend that ``--dustin-attention`` asks for; "auto" leaves whole contexts, too, to FlashInfer."""
    from dustin_sglang.attend_backend import DustinAttendBackend
    from dustin_sglang.verify_backend import DustinFlashInferBackend

    obstacle = why_not_attend(model_runner) or _why_not_tree(model_runner.server_args)
    if config.attention == "dustin" and obstacle:
        raise ConfigError(f"--dustin-attention dustin (or DUSTIN_ATTENTION): {obstacle}; use flashinfer")
    if config.attention == "flashinfer" or (config.attention == "auto" and (dense or obstacle)):
        if config.mass < 1:
            raise ConfigError(
                f"--dustin-mass (or DUSTIN_MASS) is {config.mass:g}, but FlashInfer plans from counts that the host "
                f"does not know in time{f' (dustin: {obstacle})' if obstacle else ''}; use 1"
                + ("" if obstacle else ", or --dustin-attention dustin")
            )
        return DustinFlashInferBackend
    return DustinAttendBackend


def why_not_attend(model_runner: Any) -> str | None:
    """What of a model the kernel behind lists does not compute, or None; on the CPU torch computes everything."""
    from sglang.srt.layers.radix_attention import RadixAttention

    if is_cpu():
        return None
    if model_runner.model_config.head_dim > MAX_HEAD_DIM:
        return f"its kernel takes head_dim up to {MAX_HEAD_DIM}, not {model_runner.model_config.head_dim}"
    if any(m.logit_cap > 0 for m in model_runner.model.modules() if isinstance(m, RadixAttention)):
        return "its kernel has no soft cap of the logits, which this model needs"
    return None


def _why_not_tree(server_args: Any) -> str | None:
    """What of a tree the kernel behind lists does not mask, or None."""
    tokens = server_args.speculative_num_draft_tokens
    if server_args.speculative_eagle_topk > 1 and tokens > MAX_TREE_ROWS:
        return f"its kernel takes trees of up to {MAX_TREE_ROWS} tokens, not {tokens}"
    return None


def draft_backend_factory(server_args: Any, draft_runner: Any, topk: int, num_steps: int) -> Any:
    """SGLang's draft backend factory, whose backends are tapped."""
    if is_cpu():
        from dustin_sglang.cpu.draft_backend import TappedCpuDraftBackendFactory

        return TappedCpuDraftBackendFactory(server_args, draft_runner, topk, num_steps)
    from dustin_sglang.draft_backend import TappedDraftBackendFactory

    return TappedDraftBackendFactory(server_args, draft_runner, topk, num_steps)
