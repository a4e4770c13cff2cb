"""What one request may not ask for; test/server/test_request_options.py sees the same through HTTP."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from dustin_sglang.draft_kind import DraftKind
from dustin_sglang.request_rules import RequestRefused, refuse_ignored, refuse_media


def request(sampling: dict[str, Any] | None = None, **changes: Any) -> SimpleNamespace:
    names = ("custom_logit_processor", "input_embeds", "positional_embed_overrides", "mm_inputs")
    fields: dict[str, Any] = dict.fromkeys(names) | {"return_hidden_states": False}
    return SimpleNamespace(sampling_params=SamplingParams(**(sampling or {})), **(fields | changes))


@pytest.mark.parametrize(
    "refused, message",
    [
        (request({"min_p": 0.1}), "min_p 0.1 is not supported.*use top_p or top_k"),
        (request({"sampling_seed": 7}), "seed 7 is not supported when sampling.*temperature 0"),
        (request(custom_logit_processor="{}"), "custom_logit_processor is not supported.*use logit_bias or a grammar"),
        (request(return_hidden_states=True), "whole-model draft.*use an EAGLE head"),
        (request(return_hidden_states="last"), "whole-model draft.*use an EAGLE head"),
        (request(input_embeds=[[0.0]]), "input embeddings.*send text or input_ids"),
        (request(positional_embed_overrides=object()), "input embeddings.*send text or input_ids"),
        (request(mm_inputs=object()), "images, audio and video"),
    ],
)
def test_refused_with_what_to_do_instead(refused: SimpleNamespace, message: str) -> None:
    with pytest.raises(RequestRefused, match=message):
        refuse_ignored(refused, DraftKind.STANDALONE)


@pytest.mark.parametrize("kind", [DraftKind.EAGLE, DraftKind.EAGLE3])
def test_hidden_states_are_allowed_with_a_head(kind: DraftKind) -> None:
    refuse_ignored(request(return_hidden_states=True), kind)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0, "sampling_seed": 7},  # a seed cannot change a greedy answer
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20},
        {"frequency_penalty": 1, "presence_penalty": 1, "repetition_penalty": 1.2, "min_new_tokens": 4},
        {"logit_bias": {"3": 5.0}},
        {"json_schema": "{}"},
    ],
)
def test_what_verification_applies_is_allowed(sampling: dict[str, Any]) -> None:
    refuse_ignored(request(sampling), DraftKind.STANDALONE)


@pytest.mark.parametrize("field", ["image_data", "audio_data", "video_data"])
def test_media_are_refused_before_sglang_drops_them(field: str) -> None:
    for value in ("data:,x", ["data:,x"], [[None], ["data:,x"]]):
        with pytest.raises(RequestRefused, match="send text or input_ids"):
            refuse_media(GenerateReqInput(text="w10", **{field: value}))
    for value in (None, [None, None]):
        refuse_media(GenerateReqInput(text="w10", **{field: value}))
    refuse_media(EmbeddingReqInput(text="w10"))
