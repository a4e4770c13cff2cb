"""Every difference between SGLang versions, and nothing else.

0.5.17 is the reference. Later versions are added here, with their tests, not in the modules that use SGLang.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

SUPPORTED_SGLANG = ("0.5.17",)


class UnsupportedSGLang(RuntimeError):
    """The installed SGLang is not one that this project was tested with."""


def check_version() -> None:
    """Refuse an SGLang that is not supported.

    Raises
    ------
    UnsupportedSGLang
        Naming the installed and the supported versions.
    """
    try:
        installed = version("sglang")
    except PackageNotFoundError as error:
        raise UnsupportedSGLang(f"SGLang is not installed; dustin-sglang needs {_supported()}") from error
    if installed not in SUPPORTED_SGLANG:
        raise UnsupportedSGLang(
            f"SGLang {installed} is installed, but dustin-sglang supports {_supported()}; install one of these"
        )


def _supported() -> str:
    return " or ".join(f"sglang=={v}" for v in SUPPORTED_SGLANG)


def resolve(server_args: Any, fields: dict[str, Any]) -> None:
    """Set *resolvable* server arguments, such as the attention backend.

    SGLang replaces a plain assignment to one of these by the declared default when resolution ends (0.5.17).
    """
    from sglang.srt.arg_groups.overrides import run_post_process_pass

    def dustin(view: Any) -> dict[str, Any]:
        return fields

    run_post_process_pass(server_args, dustin)


def resolved(server_args: Any) -> Any:
    """Read-only view of the server arguments in mid-resolution."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(server_args)


def max_batch_size(model_runner: Any) -> int:
    """Most requests of one forward, CUDA-graph padding included."""
    from sglang.srt.utils.common import get_cuda_graph_max_batch_size

    return get_cuda_graph_max_batch_size(model_runner.server_args, model_runner.req_to_token_pool.size)


def tensor_parallel(model_runner: Any) -> tuple[int, int, Callable[[Any], Any] | None]:
    """(rank, size, all-reduce or None) of the attention heads."""
    from sglang.srt.distributed import tensor_model_parallel_all_reduce
    from sglang.srt.runtime_context import get_parallel

    size = get_parallel().attn_tp_size
    if size == 1:
        return 0, 1, None
    return get_parallel().attn_tp_rank, size, tensor_model_parallel_all_reduce


def unified_or_cpp_radix_tree() -> str | None:
    """Name of the environment variable that asks for a radix tree other than the Python one, if any."""
    from sglang.srt.environ import envs

    for name in ("SGLANG_EXPERIMENTAL_CPP_RADIX_TREE", "SGLANG_ENABLE_UNIFIED_RADIX_TREE"):
        if getattr(envs, name).get():
            return name
    return None


def plan_stream_requested() -> bool:
    """Whether the environment asks SGLang to plan a verification while the draft still runs."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_ENABLE_OVERLAP_PLAN_STREAM.get())


def rust_server_requested() -> bool:
    """Whether the environment asks for SGLang's embedded Rust server, which has no hook for requests."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_RUST_SERVER.get())


def longer_context_allowed() -> bool:
    """Whether the user lets a model run beyond its own context length."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN.get())


def has_recurrent_layers(model_config: Any) -> bool:
    """Whether a model has Mamba, linear-attention or similar layers, whose state a selection does not cover."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model_config) is not None


def hook_sampling() -> None:
    """Let a verification tell its logits before it samples, and which rows were accepted.

    0.5.17 computes `accept_index` inside `run_eagle_verify` and drops it (0.5.23 returns it), and `eagle_sample` adds
    penalties to the logits in place. SGLang's own hook keeps the rows on the verify input, where the worker finds them
    after the step, and calls the input's `dustin_observe_logits`, if it has one, ahead. Chains that nobody monitors
    need neither. Calling this again changes nothing.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.speculative.eagle_worker_common.eagle_sample", _around_sample, HookType.AROUND)
    HookRegistry.apply_hooks()


def _around_sample(original: Callable[..., Any], verify_input: Any, batch: Any, logits_output: Any, *args: Any) -> Any:
    observe = getattr(verify_input, "dustin_observe_logits", None)
    if observe is not None:
        observe(logits_output.next_token_logits)
    result = original(verify_input, batch, logits_output, *args)
    verify_input.dustin_accept_index = result[2]
    return result
