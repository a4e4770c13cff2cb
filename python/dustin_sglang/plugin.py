"""The entry point that SGLang calls in every process, before it parses a command line."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

logger = logging.getLogger(__name__)


def register() -> None:
    """Make ``--speculative-algorithm dustin`` and its flags known to SGLang; calling it again changes nothing.

    SGLang only logs what a plugin raises and then reports an unknown algorithm. So a failure is kept: the algorithm
    is registered all the same, and using it raises the real reason.
    """
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import get_spec

    if get_spec("DUSTIN") is not None:
        return
    try:
        from dustin_sglang import compat

        # First: without the flags a command line that has one would end in argparse, before the reason is raised.
        _register_flags()
        compat.check_version()
        _register()
    except Exception as error:
        logger.exception("dustin-sglang could not be set up")
        SpeculativeAlgorithm.register("DUSTIN", spec_class=_broken(error))(lambda server_args: None)


@functools.cache  # argparse refuses a flag that is added twice
def _register_flags() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from dustin_sglang import config

    arguments = "sglang.srt.server_args.ServerArgs"
    HookRegistry.register(f"{arguments}.add_cli_args", lambda result, parser: config.add_flags(parser), HookType.AFTER)
    HookRegistry.register(f"{arguments}.from_cli_args", _from_cli_args, HookType.AROUND)


def _register() -> None:
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from dustin_sglang import algorithm

    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        from dustin_sglang.cpu.install import install

        install()
    register_radix_cache_backend(algorithm.RADIX_CACHE, _radix_cache)
    _wrap_attention_backend()
    _hook_requests()
    SpeculativeAlgorithm.register(
        algorithm.NAME,
        supports_overlap=True,
        validate_server_args=algorithm.validate_server_args,
        spec_class=algorithm.DustinAlgorithm,
    )(algorithm.create_worker)


def _hook_requests() -> None:
    """Check requests where an error still becomes an HTTP 400; count penalties and find the end in whole runs."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from dustin_sglang import finish, penalties

    finished = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
    HookRegistry.register(finished, finish.stop_before_length, HookType.AROUND)
    counted = "sglang.srt.managers.schedule_batch.ScheduleBatch.cumulate_penalty_output_tokens"
    HookRegistry.register(counted, penalties.cumulate_runs, HookType.AROUND)
    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    HookRegistry.register(f"{manager}.generate_request", _check_received, HookType.BEFORE)
    HookRegistry.register(f"{manager}._create_tokenized_object", _check_tokenized, HookType.AFTER)


def _check_received(manager: Any, received: Any, *args: Any, **kwargs: Any) -> None:
    from dustin_sglang import request_rules, request_types

    if _runs_dustin(manager):
        request_types.check_lists(received)
        request_types.check_types(getattr(received, "sampling_params", None))
        request_rules.refuse_media(received)


def _check_tokenized(request: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from dustin_sglang import request_rules, request_types

    if _runs_dustin(manager) and isinstance(request, TokenizedGenerateReqInput):
        request_types.check_ranges(request, manager.model_config.vocab_size)
        kind = SpeculativeAlgorithm.from_string(manager.server_args.speculative_algorithm).kind
        request_rules.refuse_ignored(request, kind)


def _runs_dustin(manager: Any) -> bool:
    from dustin_sglang import algorithm

    return (manager.server_args.speculative_algorithm or "").upper() == algorithm.NAME


def _from_cli_args(original: Any, *args: Any) -> Any:
    from dustin_sglang import config

    config.flags_to_env(args[-1])
    return original(*args)


def _radix_cache(ctx: Any) -> Any:
    from dustin_sglang.radix import create_dustin_radix_cache

    return create_dustin_radix_cache(ctx)


def _wrap_attention_backend() -> None:
    """Re-register the attention backend under its own name: for a dustin target it is ours, otherwise as before.

    Keeping the name keeps every rule that SGLang attaches to it.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend

    from dustin_sglang import algorithm, devices

    name = devices.attention_backend()
    original = ATTENTION_BACKENDS[name]

    @register_attention_backend(name)
    def create(model_runner: Any) -> Any:
        if model_runner.spec_algorithm.is_some() and getattr(model_runner.spec_algorithm, "name", "") == algorithm.NAME:
            if not model_runner.is_draft_worker:
                return devices.create_target_backend(model_runner)
        return original(model_runner)


def _broken(error: Exception) -> type:
    """An algorithm that answers any use with why the set-up failed."""
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class BrokenDustin(CustomSpecAlgo):
        def handle_server_args(self, server_args: Any) -> None:
            raise RuntimeError(f"dustin-sglang is installed but could not be set up: {error}") from error

    return BrokenDustin
