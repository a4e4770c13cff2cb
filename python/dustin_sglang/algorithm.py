"""What "dustin" is to SGLang: a speculative algorithm, its capabilities and its argument rules."""

from __future__ import annotations

import logging
import os
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from dustin_sglang import compat, devices
from dustin_sglang.config import DustinConfig
from dustin_sglang.draft_kind import DraftKind, detect_draft_kind
from dustin_sglang.refusals import refuse_unsupported

logger = logging.getLogger(__name__)

NAME = "DUSTIN"
RADIX_CACHE = "dustin"
# What kind of draft this launch has. The launcher decides it from the draft's config, every rank inherits it.
_KIND_VARIABLE = "DUSTIN_DRAFT_KIND"
# SGLang's own defaults (0.5.17, `_handle_eagle_family`).
_MAX_RUNNING_REQUESTS = 48
_LLAMA_HEAD_TREE = (5, 4, 8)
_CHAIN = (3, 1, 4)


class DustinAlgorithm(CustomSpecAlgo):
    """Answers SGLang's questions about the algorithm as EAGLE, EAGLE-3 or STANDALONE would, by the kind of draft.

    Three methods below are called by the scheduler but missing from `CustomSpecAlgo`
    (patches/0.5.17/0001-complete-custom-spec-algo.patch adds them).
    """

    @property
    def kind(self) -> DraftKind:
        """Kind of this launch's draft; a whole model until a launch has decided."""
        return DraftKind(os.environ.get(_KIND_VARIABLE, DraftKind.STANDALONE.value))

    def is_eagle(self) -> bool:
        """Whether the draft is an EAGLE or EAGLE-3 head."""
        return self.kind is not DraftKind.STANDALONE

    def is_eagle3(self) -> bool:
        """Whether the draft is an EAGLE-3 head."""
        return self.kind is DraftKind.EAGLE3

    def is_standalone(self) -> bool:
        """Whether the draft is a whole model."""
        return self.kind is DraftKind.STANDALONE

    def supports_grammar_overlap(self) -> bool:
        """Verification is SGLang's, grammar barrier included."""
        return True

    def carries_draft_hidden_states(self) -> bool:
        """As `SpeculativeAlgorithm.carries_draft_hidden_states`."""
        return self.is_eagle()

    def need_topk(self) -> bool:
        """As `SpeculativeAlgorithm.need_topk`: drafts relay their top-k between steps."""
        return True

    def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
        """As `SpeculativeAlgorithm.create_future_map`."""
        return SpeculativeAlgorithm.create_future_map(self, *args, **kwargs)  # type: ignore[arg-type]

    def handle_server_args(self, server_args: Any) -> None:
        """Choose what the user left open; `validate_server_args` has refused what is not supported."""
        _choose_backends(server_args)
        _choose_draft_shape(server_args, self.kind)
        if server_args.max_running_requests is None:
            server_args.max_running_requests = _MAX_RUNNING_REQUESTS
            logger.warning(
                "Max running requests is set to %d for speculative decoding; --max-running-requests overrides it.",
                _MAX_RUNNING_REQUESTS,
            )
        if server_args.enable_mixed_chunk:
            server_args.enable_mixed_chunk = False
            logger.warning("Mixed chunked prefill is switched off: speculative decoding does not run with it.")
        if server_args.device == "cpu":
            compat.resolve(server_args, {"disable_overlap_schedule": True})


def validate_server_args(server_args: Any) -> None:
    """Decide the kind of draft and refuse what is not supported, before SGLang rewrites any speculative argument.

    Raises
    ------
    ValueError
        With a message that says what to do instead.
    """
    DustinConfig.from_env()  # a bad setting must stop the launch here, not a rank later
    os.environ.pop(_KIND_VARIABLE, None)  # an earlier launch in this process may have had another kind
    kind = detect_draft_kind(server_args)
    os.environ[_KIND_VARIABLE] = kind.value
    refuse_unsupported(server_args, kind)


def _choose_backends(server_args: Any) -> None:
    name = devices.attention_backend()
    compat.resolve(
        server_args,
        {"attention_backend": name, "prefill_attention_backend": None, "decode_attention_backend": None},
    )
    server_args.speculative_draft_attention_backend = name
    server_args.radix_cache_backend = RADIX_CACHE


def _choose_draft_shape(server_args: Any, kind: DraftKind) -> None:
    """Steps, topk and draft tokens: all three or none are given, a chain verifies steps + 1 tokens."""
    shape = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    given = [getattr(server_args, name) for name in shape]
    if given == [None, None, None]:
        llama = "LlamaForCausalLM" in (server_args.get_model_config().hf_config.architectures or [])
        given = list(_LLAMA_HEAD_TREE if kind is not DraftKind.STANDALONE and llama else _CHAIN)
    elif None in given:
        raise ValueError(
            "give all three of --speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens, "
            f"or none of them; got {given}"
        )
    steps, topk, tokens = given
    if steps < 2:
        raise ValueError(
            f"--speculative-num-steps is {steps}; dustin needs at least 2, since the draft's decode steps look ahead "
            "and one step has none"
        )
    if topk == 1 and tokens != steps + 1:
        logger.warning("--speculative-num-draft-tokens is set to %d: a chain verifies steps + 1 tokens.", steps + 1)
        tokens = steps + 1
    for name, value in zip(shape, (steps, topk, tokens), strict=True):
        setattr(server_args, name, value)


def create_worker(server_args: Any) -> type:
    """The worker class for this launch's kind of draft; called in every rank."""
    from dustin_sglang.worker import DustinEagleWorker, DustinStandaloneWorker

    algorithm = SpeculativeAlgorithm.from_string(server_args.speculative_algorithm)
    return DustinStandaloneWorker if algorithm.is_standalone() else DustinEagleWorker
