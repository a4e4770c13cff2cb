"""Malformed sampling parameters are refused before they reach the scheduler."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from dustin_sglang.request_types import BadRequest, check_lists, check_ranges, check_types


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"temperature": 0, "top_p": 1, "top_k": 5, "max_new_tokens": None},
        {"stop": "a", "stop_token_ids": [1, 2], "stop_regex": ["a"]},
        {"stop": ("a", "b"), "stop_token_ids": {3}},
        {"logit_bias": {"3": 1}, "ignore_eos": True, "n": 2, "temperature": None},
        [{"regex": "a"}, {"custom_params": {"a": [1, "b", None]}}],
    ],
)
def test_what_sglang_takes_is_taken(params: Any) -> None:
    check_types(params)


@pytest.mark.parametrize(
    "params, message",
    [
        (3, "must be an object or a list of objects, not 3"),
        ([{}, "a"], "must be an object"),
        ({"temprature": 1}, "no field 'temprature'"),
        ({"is_normalized": True}, "no field 'is_normalized'"),
        ({"temperature": "hot"}, "temperature is 'hot': Expected `float"),
        ({"max_new_tokens": [1]}, r"max_new_tokens is \[1\]: Expected `int"),
        ({"ignore_eos": 2}, "ignore_eos is 2"),
        ({"n": True}, "n is True"),
        ({"stop_token_ids": ["w"]}, "Expected `int"),
        ({"regex": "a\0"}, "regex has a NUL character"),
        ({"ebnf": "root ::= " + "(" * 201 + '"a"' + ")" * 201}, "ebnf is nested more than 200 deep"),
        ({"json_schema": '{"items":' * 1000 + "{}" + "}" * 1000}, "json_schema is nested"),
        ({"top_k": 2**31}, "the largest number is 2147483647"),
        ({"stop_token_ids": [10**30]}, "stop_token_ids"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(params: Any, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        check_types(params)


def request(top_logprobs_num: int = 0, input_ids: tuple[int, ...] = (0, 99), **sampling: Any) -> SimpleNamespace:
    params = SamplingParams(**sampling)
    return SimpleNamespace(sampling_params=params, top_logprobs_num=top_logprobs_num, input_ids=array("q", input_ids))


@pytest.mark.parametrize(
    "bad, message",
    [
        (request(input_ids=(5, -1)), "input_ids go from -1 to 5; tokens are 0 to 99"),
        (request(input_ids=(5, 100)), "input_ids go from 5 to 100"),
        (request(stop_token_ids=[100]), "stop_token_ids has 100; tokens are 0 to 99"),
        (request(stop_token_ids=[-1]), "stop_token_ids has -1"),
        (request(logit_bias={"3": float("inf")}), "logit_bias of token 3 is inf; it must be finite"),
        (request(top_logprobs_num=101), "top_logprobs_num is 101; it must be from 0 to 100"),
        (request(top_logprobs_num=-1), "top_logprobs_num is -1"),
    ],
)
def test_values_beyond_the_vocabulary_are_refused(bad: SimpleNamespace, message: str) -> None:
    check_ranges(request(100, stop_token_ids=[0, 99], logit_bias={"3": -100.0}), 100)
    with pytest.raises(BadRequest, match=message):
        check_ranges(bad, 100)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"text": "a", "sampling_params": []}, "sampling_params is a list of 0; a single prompt takes no list"),
        ({"input_ids": [5, 6], "logprob_start_len": [0]}, "logprob_start_len is a list of 1; a single prompt"),
        ({"text": ["a", "b"], "sampling_params": []}, "sampling_params is a list of 0; the request has 2 prompts"),
        ({"input_ids": [[5], [6]], "return_logprob": [True]}, "return_logprob is a list of 1; the request has 2"),
        ({"input_ids": [], "top_logprobs_num": [1]}, "top_logprobs_num is a list of 1; the request has 0"),
    ],
)
def test_a_list_for_each_prompt_is_as_long_as_that_of_the_prompts(fields: dict[str, Any], message: str) -> None:
    """SGLang answers these with a 500."""
    with pytest.raises(BadRequest, match=message):
        check_lists(SimpleNamespace(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a", "sampling_params": {}, "logprob_start_len": 0, "token_ids_logprob": [3, 4]},
        {"text": ["a", "b"], "sampling_params": [{}, {}], "return_logprob": True},
        {"input_ids": [[5], [6]], "sampling_params": None, "top_logprobs_num": [1, 2]},
        {"input_embeds": [[0.0]], "sampling_params": []},  # refused as embeddings
        {},
    ],
)
def test_lists_that_fit_are_taken(fields: dict[str, Any]) -> None:
    check_lists(SimpleNamespace(**fields))
