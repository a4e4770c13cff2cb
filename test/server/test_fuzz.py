"""Random and odd requests: each gets a right answer or a clear 4xx, and the server lives.

The generator is seeded: a failure comes again. It draws a valid request and spoils none, one or two of its fields, so
that most of a request is right and the wrong part is reached.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from serving import Server
from test_concurrency import idle
from words import words

ODD = [None, True, -1, 0, 1, 2**31, 2**63, 10**30, -0.5, 1e-9, 1e308, "", "w10", "\0", "é" * 50, [], [[]], [None], {}]
ODD += [[-1], [5000], ["w10", 3], {"a": 1}, float("nan"), float("inf"), "NaN", "1"]
SAMPLING: dict[str, list[Any]] = {
    "temperature": [0, 1e-5, 0.7, 1, 5],
    "top_p": [1e-6, 0.5, 1],
    "top_k": [-1, 1, 3, 1000],
    "min_p": [0, 0.1],
    "frequency_penalty": [-2, 0, 2],
    "presence_penalty": [-2, 0, 2],
    "repetition_penalty": [0.5, 1, 2],
    "min_new_tokens": [0, 3],
    "stop": [None, "w77", ["w77", "w12"]],
    "stop_token_ids": [None, [77, 12]],
    "stop_regex": [None, "w1[0-9]"],
    "ignore_eos": [True, False],
    "logit_bias": [None, {"77": 5}, {"2": -100}],
    "sampling_seed": [None, 7],
    "n": [1, 2],
    "regex": [None, "(w1[0-9]){2}", "(w1"],
    "json_schema": [None, '{"type": "object"}', "{"],
    "skip_special_tokens": [True, False],
    "no_stop_trim": [True, False],
}
REQUEST: dict[str, list[Any]] = {
    "return_logprob": [True, False],
    "logprob_start_len": [-1, 0, 5],
    "top_logprobs_num": [0, 2],
    "token_ids_logprob": [None, [5, 77]],
    "return_hidden_states": [True, False],
    "stream": [False, False, True],
    "custom_logit_processor": [None, "{}"],
    "extra_key": [None, "tenant"],
    "priority": [None, 1],
    "input_embeds": [None, [[0.0] * 64] * 4],
    "session_params": [None, {"id": "no such session"}],
    "lora_path": [None, "adapter"],
    "rid": [None, "same"],
    "image_data": [None, "nonsense"],
}
OPENAI = {
    "temperature": [0, 1],
    "max_tokens": [1, 12],
    "n": [1, 2],
    "seed": [None, 7],
    "logprobs": [None, 2],
    "echo": [False, True],
    "stop": [None, "w77"],
    "stream": [False, True],
    "response_format": [None, {"type": "json_object"}, {"type": "json_schema"}],
    "tools": [None, [{"type": "function", "function": {"name": "f", "parameters": {}}}], [{}]],
    "logit_bias": [None, {"77": 5}],
    "best_of": [None, 2],
}


def some(draw: random.Random, fields: dict[str, list[Any]], share: float) -> dict[str, Any]:
    return {name: draw.choice(values) for name, values in fields.items() if draw.random() < share}


def spoiled(draw: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    for _ in range(draw.choice([0, 0, 1, 1, 2])):
        body[draw.choice([*body, "no_such_field"])] = draw.choice(ODD)
    return body


def prompt(draw: random.Random) -> str:
    return words(draw.choice([1, 5, 30, 60, 70, 150, 600]), first=draw.randrange(250), step=draw.choice([0, 7]))


def native(draw: random.Random) -> tuple[str, Any]:
    sampling = some(draw, SAMPLING, 0.12) | {"max_new_tokens": draw.choice([0, 1, 5, 12])}
    body = some(draw, REQUEST, 0.05) | {"sampling_params": spoiled(draw, sampling)}
    text = prompt(draw)
    ids = [int(word[1:]) for word in text.split()]
    body |= draw.choice([{"text": text}, {"input_ids": ids}, {"text": [text, prompt(draw)]}, {"input_ids": [ids, ids]}])
    return "generate", spoiled(draw, body)


def openai(draw: random.Random) -> tuple[str, Any]:
    body = some(draw, OPENAI, 0.2) | {"model": "default", "max_tokens": draw.choice([1, 5, 12])}
    if draw.random() < 0.5:
        return "v1/completions", spoiled(draw, body | {"prompt": prompt(draw)})
    messages = [{"role": draw.choice(["user", "system", "tool", "robot"]), "content": prompt(draw)}]
    return "v1/chat/completions", spoiled(draw, body | {"messages": messages})


def raw(draw: random.Random) -> tuple[str, Any]:
    """A body that is no request at all, or another endpoint."""
    path = draw.choice(["generate", "v1/completions", "v1/chat/completions", "v1/embeddings", "v1/score", "tokenize"])
    whole = draw.choice([*ODD, b"{", b"\xff\xfe", b"[" * 5000, b'{"text": "w10"', b""])
    return path, whole


def send(url: str, path: str, body: Any) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = requests.post(f"{url}/{path}", data=data, headers={"Content-Type": "application/json"}, timeout=120)
    return response.status_code, response.text


def check(path: str, body: Any, status: int, text: str) -> None:
    """A 2xx is an answer of the length that was asked for; a 4xx says what is wrong; anything else is a fault.

    But SGLang 0.5.17 itself answers some malformed chats with a 500, in its HTTP layer and before any of our hooks.
    """
    if status == 500 and text == "Internal Server Error" and sglang_fails(path, body):
        return
    assert 200 <= status < 300 or 400 <= status < 500, f"{status}: {text[:500]}"
    if status >= 400:
        assert len(text) > 20, f"{status} without a word"
        assert "Traceback" not in text
        return
    if path != "generate" or (isinstance(body, dict) and body.get("stream")):
        return
    for answer in json.loads(text) if text.startswith("[") else [json.loads(text)]:
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] in ("stop", "length", "abort")
        assert meta["completion_tokens"] == len(answer["output_ids"])
        sampling = body.get("sampling_params")
        if isinstance(sampling, dict) and isinstance(limit := sampling.get("max_new_tokens"), int):
            assert len(answer["output_ids"]) <= max(limit, 1)


def sglang_fails(path: str, body: Any) -> bool:
    """Whether SGLang's own check of a chat fails: the chat, or its response_format, is no object."""
    if path != "v1/chat/completions":
        return False
    return not isinstance(body, dict) or not isinstance(body.get("response_format"), (dict, type(None)))


def fuzz(server: Server, seed: int, count: int, workers: int) -> Counter[int]:
    """Send `count` requests, check each and that greedy answers stay what they were; return counts by status."""
    reference = {length: server.generate(words(length), 12)["output_ids"] for length in (20, 150)}
    before, draw = idle(server), random.Random(seed)
    made = [draw.choice([native, native, native, openai, openai, raw])(draw) for _ in range(count)]
    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(lambda request: send(server.url, *request), made))
    faults = []
    for number, ((path, body), (status, text)) in enumerate(zip(made, results, strict=True)):
        try:
            check(path, body, status, text)
        except AssertionError as error:
            faults.append(f"request {number}: {path} {re.sub(r'( w[0-9]+)+', ' ...', str(body))[:1000]}\n  {error}")
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults[:30])
    assert {length: server.generate(words(length), 12)["output_ids"] for length in reference} == reference
    assert idle(server) == before
    return Counter(status for status, _ in results)


@pytest.mark.parametrize("kind", ["server", "head_server"])
def test_a_hundred_odd_requests(kind: str, request: pytest.FixtureRequest) -> None:
    statuses = fuzz(request.getfixturevalue(kind), seed=1, count=100, workers=4)
    assert statuses[200] >= 15 and statuses[400] >= 15


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["server", "head_server"])
def test_two_thousand_odd_requests(kind: str, request: pytest.FixtureRequest) -> None:
    fuzz(request.getfixturevalue(kind), seed=2, count=1000, workers=6)
