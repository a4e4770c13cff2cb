"""Types and ranges of a request's numbers, checked where a fault still costs that request alone.

SGLang looks at some of them only in the scheduler, where one bad value ends the process for everybody, and answers
others with a 500 without a word.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

_INT32_MAX = 2**31 - 1  # what the scheduler's tensors hold
# xgrammar 0.2.1 ends the process on a NUL character and on deep nesting (a schema of 1000 arrays overflows its stack).
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_MAX_NESTING = 200
_PER_PROMPT = ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num")
_INTERNAL = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"}


class BadRequest(ValueError):
    """A request that is malformed; SGLang answers a `ValueError` with a 400."""


def check_lists(request: Any) -> None:
    """Check a request as it came in: what is given for each prompt must be a list as long as that of the prompts.

    Raises
    ------
    BadRequest
        A list of another length, or a list for a single prompt.
    """
    text = getattr(request, "text", None)
    prompts = text if text is not None else getattr(request, "input_ids", None)
    if prompts is None:
        return
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
    for name in _PER_PROMPT:
        value = getattr(request, name, None)
        if isinstance(value, list) and (single or len(value) != len(prompts)):
            wanted = "a single prompt takes no list" if single else f"the request has {len(prompts)} prompts"
            raise BadRequest(f"{name} is a list of {len(value)}; {wanted}")


def check_types(sampling_params: Any) -> None:
    """Check sampling parameters as they came in: one object, or a list of them for a batch.

    Raises
    ------
    BadRequest
        A field that SGLang does not have, or a value of another type than its field's.
    """
    for params in sampling_params if isinstance(sampling_params, list) else [sampling_params]:
        if params is None:
            continue
        if not isinstance(params, dict):
            raise BadRequest(f"sampling_params must be an object or a list of objects, not {_short(params)}")
        for name, value in params.items():
            if name not in _fields():
                raise BadRequest(f"sampling_params has no field {_short(name)}")
            try:
                msgspec.convert(value, _fields()[name] | None)
            except msgspec.ValidationError as error:
                raise BadRequest(f"sampling_params.{name} is {_short(value)}: {error}") from None
            if any(abs(number) > _INT32_MAX for number in _whole_numbers(value)):
                raise BadRequest(f"sampling_params.{name} is {_short(value)}: the largest number is {_INT32_MAX}")
            if name in _GRAMMARS and value:
                _check_grammar(name, value)


def check_ranges(request: Any, vocab_size: int) -> None:
    """Check a tokenized request against the vocabulary.

    Raises
    ------
    BadRequest
        A token, a bias or a number of logprobs that the scheduler cannot use.
    """
    sampling = request.sampling_params
    if request.input_ids:
        ids = np.asarray(request.input_ids)  # a long prompt; Python's own min and max would take milliseconds
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise BadRequest(f"input_ids go from {ids.min()} to {ids.max()}; tokens are 0 to {vocab_size - 1}")
    for token in sampling.stop_token_ids or ():
        if not 0 <= token < vocab_size:
            raise BadRequest(f"stop_token_ids has {token}; tokens are 0 to {vocab_size - 1}")
    for token, bias in (sampling.logit_bias or {}).items():
        if not math.isfinite(bias):
            raise BadRequest(f"logit_bias of token {token} is {bias}; it must be finite")
    if not 0 <= request.top_logprobs_num <= vocab_size:
        raise BadRequest(f"top_logprobs_num is {request.top_logprobs_num}; it must be from 0 to {vocab_size}")


def _check_grammar(name: str, grammar: str) -> None:
    if "\0" in grammar:
        raise BadRequest(f"sampling_params.{name} has a NUL character")
    depth = 0
    for character in grammar:
        depth += (character in "([{") - (character in ")]}")
        if depth > _MAX_NESTING:
            raise BadRequest(f"sampling_params.{name} is nested more than {_MAX_NESTING} deep")


@functools.cache
def _fields() -> dict[str, Any]:
    from sglang.srt.sampling.sampling_params import SamplingParams

    return {name: hint for name, hint in typing.get_type_hints(SamplingParams).items() if name not in _INTERNAL}


def _whole_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _whole_numbers(item)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
