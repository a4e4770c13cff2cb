"""Which kind of draft a launch has, decided once from the draft's config."""

from __future__ import annotations

from enum import Enum
from typing import Any


class DraftKind(Enum):
    """Kinds of draft, named as SGLang's algorithms for them."""

    STANDALONE = "standalone"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"


# Multi-token-prediction layers of a target's own checkpoint; SGLang runs these with workers of their own.
_MTP_MARKS = ("NextN", "MTP", "Mtp", "Gemma4Assistant", "Gemma4UnifiedAssistant", "DFlash", "DSpark", "Medusa")


def detect_draft_kind(server_args: Any) -> DraftKind:
    """Read the draft's config.

    Running an EAGLE-3 head as an EAGLE one is silently useless (sglang #21272), so nobody is asked: the config's
    architecture decides.

    Raises
    ------
    ValueError
        No draft was given, its config cannot be read, or it is a multi-token-prediction head.
    """
    path = server_args.speculative_draft_model_path
    if path is None:
        raise ValueError(
            "--speculative-algorithm dustin needs --speculative-draft-model-path: a small model of the target's "
            "vocabulary, an EAGLE or EAGLE-3 head, or a truncated copy made by `python -m dustin_sglang.make_draft`"
        )
    architectures = draft_config(server_args).hf_config.architectures or []
    name = architectures[0] if architectures else ""
    if any(mark in name for mark in _MTP_MARKS):
        raise ValueError(
            f"the draft {path} is a {name}: multi-token-prediction drafts are not supported; use a whole small model "
            "or an EAGLE or EAGLE-3 head"
        )
    if "Eagle3" in name:
        return DraftKind.EAGLE3
    return DraftKind.EAGLE if "Eagle" in name else DraftKind.STANDALONE


def draft_config(server_args: Any) -> Any:
    """SGLang's `ModelConfig` of the draft, with the context length of the draft itself."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.utils.hf_transformers_utils import get_config, get_context_length, get_hf_text_config

    path, revision = server_args.speculative_draft_model_path, server_args.speculative_draft_model_revision
    config = get_config(path, trust_remote_code=server_args.trust_remote_code, revision=revision)
    return ModelConfig.from_server_args(
        server_args,
        model_path=path,
        model_revision=revision,
        is_draft_model=True,
        context_length=get_context_length(get_hf_text_config(config)),
    )
