"""What is refused for a single request: options that verification would drop without a word.

SGLang's speculative verification applies temperature, top_p, top_k, penalties, logit_bias and grammars. It never looks
at the options below, though the first token of an answer, which comes from the prefill, obeys them. A request that
names one gets an HTTP 400 which says what to do instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dustin_sglang.draft_kind import DraftKind

_MEDIA = "images, audio and video are not supported; send text or input_ids"


class RequestRefused(ValueError):
    """A request with an option that verification would ignore; SGLang answers a `ValueError` with a 400."""


def refuse_media(request: Any) -> None:
    """Check a request as it came in: where the model reads text alone, SGLang drops images, audio and video.

    Raises
    ------
    RequestRefused
        The request has any of them.
    """
    if request.contains_mm_input():
        raise RequestRefused(f"--speculative-algorithm dustin: {_MEDIA}")


def refuse_ignored(request: Any, kind: DraftKind) -> None:
    """Check a tokenized request before it is sent to the scheduler.

    Parameters
    ----------
    request
        SGLang's ``TokenizedGenerateReqInput``: its sampling parameters are normalized, server defaults included.
    kind
        Kind of this launch's draft.

    Raises
    ------
    RequestRefused
        The first option that would be ignored and what to do instead.
    """
    for reason in _reasons(request, kind):
        raise RequestRefused(f"--speculative-algorithm dustin: {reason}")


def _reasons(request: Any, kind: DraftKind) -> Iterator[str]:
    sampling = request.sampling_params
    if sampling.min_p > 0:
        yield f"min_p {sampling.min_p} is not supported: verification does not apply it; use top_p or top_k"
    # SGLang writes greedy decoding as a top_k of 1; a seed cannot change it, and benchmarks send one with everything.
    if sampling.sampling_seed is not None and sampling.top_k > 1:
        yield (
            f"seed {sampling.sampling_seed} is not supported when sampling: verification draws from one generator for "
            "all requests; remove the seed, or use temperature 0"
        )
    if request.custom_logit_processor:
        yield (
            "custom_logit_processor is not supported: verification does not call it; use logit_bias or a grammar "
            "(json_schema, regex, ebnf)"
        )
    if request.return_hidden_states and kind is DraftKind.STANDALONE:
        yield (
            "return_hidden_states is not supported with a whole-model draft: verification does not keep them; use an "
            "EAGLE head, or a server without speculation"
        )
    if request.input_embeds is not None or request.positional_embed_overrides is not None:
        yield "input embeddings are not supported: the draft needs tokens; send text or input_ids"
    if request.mm_inputs is not None:
        yield _MEDIA
