"""Options of a request, with a whole-model draft and with a head: each works, seen by its effect, or is a 400."""

from __future__ import annotations

import json
import re

import pytest
import requests
from serving import ON_CPU, TOLERANCE, Server
from words import words

SHORT, LONG = words(20), words(150)  # within the budget of both servers, and beyond it


def ids(answer: dict) -> list[int]:
    return answer["output_ids"]


@pytest.mark.parametrize(
    "sampling, request_fields, message",
    [
        ({"temperature": 1, "min_p": 0.1}, {}, "min_p 0.1 is not supported"),
        ({"temperature": 1, "sampling_seed": 7}, {}, "seed 7 is not supported when sampling"),
        ({}, {"custom_logit_processor": "{}"}, "custom_logit_processor is not supported"),
    ],
)
def test_an_option_that_verification_ignores_is_a_400(
    either: Server, sampling: dict, request_fields: dict, message: str
) -> None:
    for text in (LONG, [SHORT, LONG]):  # alone and in a batch
        response = either.post(4, sampling, text=text, **request_fields)
        assert response.status_code == 400 and message in response.text
    assert len(ids(either.generate(LONG, 4))) == 4


@pytest.mark.parametrize(
    "body, message", [({"min_p": 0.1}, "min_p"), ({"seed": 7}, "seed 7"), ({"seed": 7, "n": 2}, "seed 7")]
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_openai_clients_get_the_same_400(either: Server, path: str, body: dict, message: str) -> None:
    prompt = {"prompt": SHORT} if path == "completions" else {"messages": [{"role": "user", "content": SHORT}]}
    body = {"model": "default", "max_tokens": 4, "temperature": 1} | prompt | body
    response = requests.post(f"{either.url}/v1/{path}", json=body, timeout=60)
    assert response.status_code == 400 and message in response.text


def test_a_seed_is_allowed_where_it_changes_nothing(either: Server) -> None:
    assert ids(either.generate(LONG, 8, sampling_seed=7)) == ids(either.generate(LONG, 8))


def test_sampling_draws_among_the_top_k_and_not_always_the_best(either: Server) -> None:
    answer = either.ask(
        40, {"temperature": 5, "top_k": 3, "ignore_eos": True}, text=LONG, return_logprob=True, top_logprobs_num=3
    )
    top = [[token for _, token, _ in row] for row in answer["meta_info"]["output_top_logprobs"]]
    assert all(token in row for token, row in zip(ids(answer), top, strict=True))
    ranks = [row.index(token) for token, row in zip(ids(answer), top, strict=True)]
    assert {0, 1, 2} == set(ranks[1:]), "at this temperature the three are about equally likely"


def test_a_low_temperature_top_p_and_top_k_make_sampling_greedy(either: Server) -> None:
    greedy = ids(either.generate(LONG, 16))
    for sampling in ({"temperature": 2e-6}, {"temperature": 2, "top_p": 1e-6}, {"temperature": 2, "top_k": 1}):
        assert ids(either.generate(LONG, 16, **sampling)) == greedy
    assert ids(either.generate(LONG, 16, temperature=2)) != greedy


def test_logit_bias_forces_and_forbids(either: Server) -> None:
    assert ids(either.generate(LONG, 12, logit_bias={"77": 100})) == [77] * 12
    greedy = ids(either.generate(LONG, 12))
    assert not set(greedy) & set(ids(either.generate(LONG, 12, logit_bias={str(token): -100 for token in greedy})))


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 2}])
def test_penalties_drive_an_answer_away_from_its_own_tokens(either: Server, penalty: dict) -> None:
    bias = {str(token): 30 for token in range(60, 80)}  # twenty tokens to choose from, so that some come again
    without, penalised = (ids(either.generate(LONG, 20, logit_bias=bias, **options)) for options in ({}, penalty))
    assert len(set(penalised)) > len(set(without))


@pytest.mark.parametrize("least", [1, 6, 15])
def test_min_new_tokens_holds_back_the_end_and_no_longer_than_a_run(either: Server, least: int) -> None:
    answer = either.generate(LONG, 40, min_new_tokens=least, logit_bias={"2": 100})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
    # The end may come in a round that begins with `least` tokens; a run has at most 6 (head) of them. On a GPU, where
    # scheduling overlaps, the run before is not counted yet either.
    assert least <= len(ids(answer)) - 1 <= least + (6 if ON_CPU else 12)


@pytest.mark.parametrize("at", range(1, 9))
def test_a_stop_token_inside_a_run_ends_ids_text_and_logprobs_alike(either: Server, at: int) -> None:
    """SGLang PR #25980, #33758, #28802 and #11819, vLLM PR #47616: nothing of a run leaks past its end."""
    whole = either.ask(20, {"ignore_eos": True}, text=LONG, return_logprob=True)
    stop = ids(whole)[at]
    end = ids(whole).index(stop) + 1
    answer = either.ask(20, {"stop_token_ids": [stop]}, text=LONG, return_logprob=True)
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": stop}
    assert ids(answer) == ids(whole)[:end] and meta["completion_tokens"] == end
    assert [token for _, token, _ in meta["output_token_logprobs"]] == ids(answer)
    assert answer["text"].split() == whole["text"].split()[: end - 1], "the stop token has no text"


def test_stop_token_and_max_new_tokens_in_one_run(either: Server) -> None:
    """SGLang PR #25980: whichever comes first ends the answer, and the reason says which."""
    whole = ids(either.generate(LONG, 20, ignore_eos=True))
    for at in range(2, 6):
        first = whole.index(whole[at])
        for limit, reason in ((first, "length"), (first + 1, "length"), (first + 2, "stop")):
            answer = either.generate(LONG, limit, stop_token_ids=[whole[at]])
            assert ids(answer) == whole[: min(limit, first + 1)]
            assert answer["meta_info"]["finish_reason"]["type"] == reason


# No word of these begins with another word of the vocabulary: such a beginning is a dead end, which SGLang aborts.
GRAMMARS = [
    ({"regex": "(w1[0-9]){3}(w20|w22)"}, 4),
    ({"ebnf": 'root ::= pair pair "w25"\npair ::= "w10" | "w20"'}, 3),
    ({"json_schema": json.dumps({"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]})}, 3),
]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5}], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "grammar, length", GRAMMARS, ids=lambda value: next(iter(value)) if isinstance(value, dict) else ""
)
def test_a_grammar_shapes_the_answer(either: Server, grammar: dict, length: int, sampling: dict) -> None:
    """SGLang #9187: structured output with a draft comes to its end."""
    for prompt in (SHORT, LONG):
        answer = either.generate(prompt, 30, **grammar, **sampling)
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": 2}
        text = answer["text"].split()
        if "regex" in grammar:
            assert re.fullmatch(grammar["regex"], "".join(text))
        elif "ebnf" in grammar:
            assert text[-1] == "w25" and set(text[:-1]) <= {"w10", "w20"}
        else:
            assert json.loads(answer["text"]) == {"a": "x"}
        assert len(text) == length


def test_a_grammar_streams_through_the_openai_api(either: Server) -> None:
    """SGLang #9187: json_schema with streaming."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": LONG}],
        "max_tokens": 30,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }
    with requests.post(f"{either.url}/v1/chat/completions", json=body, stream=True, timeout=60) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith(b"data: ")]
    chunks = [json.loads(line) for line in lines if line != b"[DONE]"]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert json.loads(text) == {"a": "x"} and lines[-1] == b"[DONE]"
    assert chunks[-1]["usage"]["completion_tokens"] == 4, "three tokens and the end"


@pytest.mark.parametrize(
    "grammar",
    [
        {"regex": "(w1"},
        {"ebnf": "root ::= nothing"},
        {"json_schema": "{"},
        {"json_schema": '{"type": "no such type"}'},
        {"regex": "w10", "ebnf": 'root ::= "w10"'},
    ],
)
def test_a_bad_grammar_fails_its_request_and_not_the_server(either: Server, grammar: dict) -> None:
    """SGLang #24283 (#15050) and #20148, vLLM #11484: response_format must not end the process."""
    response = either.post(8, grammar, text=LONG)
    assert response.status_code == 400 and response.json()["error"]["message"]
    assert len(ids(either.generate(LONG, 4))) == 4


def test_grammar_requests_leave_their_neighbours_alone(either: Server) -> None:
    plain = ids(either.generate(SHORT, 12))
    body = {
        "text": [SHORT, LONG, SHORT],
        "sampling_params": [
            {"temperature": 0, "max_new_tokens": 12},
            {"temperature": 0, "max_new_tokens": 12, "regex": "(w1[0-9]){6}"},
            {"temperature": 2, "max_new_tokens": 12, "top_k": 1},
        ],
    }
    first, second, third = requests.post(f"{either.url}/generate", json=body, timeout=60).json()
    assert ids(first) == ids(third) == plain
    assert len(second["text"].split()) == 6 and all(10 <= token <= 19 for token in ids(second)[:6])


def reread(server: Server, answer: dict, prompt: str) -> list[float]:
    """Log-probabilities that a dense prefill gives the tokens of an answer."""
    prompt_ids = [int(word[1:]) for word in prompt.split()]
    again = server.ask(
        0, {}, input_ids=prompt_ids + ids(answer), return_logprob=True, logprob_start_len=len(prompt_ids) - 1
    )
    rows = again["meta_info"]["input_token_logprobs"][1:]
    assert [token for _, token, _ in rows] == ids(answer)
    return [value for value, _, _ in rows]


def test_logprobs_are_those_of_the_distribution_that_was_verified(either: Server) -> None:
    """Within the budget that is the dense model's; beyond it the first token's alone, since a prefill is dense."""
    for prompt, dense in ((SHORT, True), (LONG, False)):
        requests.post(f"{either.url}/flush_cache", timeout=30)
        answer = either.ask(16, {"ignore_eos": True}, text=prompt, return_logprob=True, top_logprobs_num=2)
        meta = answer["meta_info"]
        given = [value for value, _, _ in meta["output_token_logprobs"]]
        assert [row[0][0] for row in meta["output_top_logprobs"]] == given, "greedy takes the best"
        expected = reread(either, answer, prompt)
        assert given[0] == pytest.approx(expected[0], abs=TOLERANCE)
        assert (given == pytest.approx(expected, abs=TOLERANCE)) is dense


def test_logprobs_of_chosen_tokens_are_those_of_the_best(either: Server) -> None:
    best = either.ask(8, {"ignore_eos": True}, text=LONG, return_logprob=True, top_logprobs_num=1)["meta_info"]
    wanted = [row[0][1] for row in best["output_top_logprobs"]]
    chosen = either.ask(8, {"ignore_eos": True}, text=LONG, return_logprob=True, token_ids_logprob=wanted)["meta_info"]
    for place, (row, top) in enumerate(
        zip(chosen["output_token_ids_logprobs"], best["output_top_logprobs"], strict=True)
    ):
        assert row[place][:2] == [pytest.approx(top[0][0], abs=TOLERANCE), wanted[place]]


def test_logprobs_see_penalties_and_bias(either: Server) -> None:
    answer = either.ask(8, {"logit_bias": {"77": 100}}, text=LONG, return_logprob=True)
    assert all(value > -TOLERANCE for value, _, _ in answer["meta_info"]["output_token_logprobs"][1:])


def test_several_answers_to_one_prompt(either: Server) -> None:
    body = {"model": "default", "prompt": LONG, "max_tokens": 10, "n": 3, "ignore_eos": True}
    for temperature, distinct in ((0, 1), (2, 3)):
        response = requests.post(
            f"{either.url}/v1/completions", json=body | {"temperature": temperature}, timeout=60
        ).json()
        assert len({choice["text"] for choice in response["choices"]}) == distinct
        assert response["usage"]["completion_tokens"] == 30


def test_streaming_reports_usage_once_at_the_end(either: Server) -> None:
    body = {"model": "default", "prompt": LONG, "max_tokens": 10, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
    with requests.post(f"{either.url}/v1/completions", json=body, stream=True, timeout=60) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith(b"data: ")]
    chunks = [json.loads(line) for line in lines if line != b"[DONE]"]
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert usages == [chunks[-1]["usage"]] and chunks[-1]["choices"] == []
    assert usages[0]["prompt_tokens"] == 150 and usages[0]["completion_tokens"] == 10


def test_hidden_states_with_a_head_are_those_of_a_prefill(head_server: Server) -> None:
    fields = {"return_hidden_states": True}
    requests.post(f"{head_server.url}/flush_cache", timeout=30)
    answer = head_server.ask(12, {"ignore_eos": True}, text=SHORT, **fields)
    prompt, *generated = answer["meta_info"]["hidden_states"]
    assert len(prompt) == 20
    whole = [int(word[1:]) for word in SHORT.split()] + ids(answer)
    requests.post(f"{head_server.url}/flush_cache", timeout=30)
    expected = head_server.ask(1, {}, input_ids=whole, **fields)["meta_info"]["hidden_states"][0][20:]
    assert len(generated) >= 11  # a run may be accepted past the last token asked for; the last token has no row
    for row, right in zip(generated[:11], expected, strict=False):
        assert row == pytest.approx(right, abs=TOLERANCE)


def test_hidden_states_with_a_whole_model_draft_are_a_400(server: Server) -> None:
    response = server.post(4, {}, text=SHORT, return_hidden_states=True)
    assert response.status_code == 400 and "whole-model draft" in response.text


@pytest.mark.parametrize(
    "path, body",
    [
        ("v1/embeddings", {"model": "default", "input": SHORT}),
        ("encode", {"text": SHORT}),
        ("generate", {"input_embeds": [[0.0] * 64] * 4}),
        ("v1/rerank", {"query": SHORT, "documents": [SHORT]}),
    ],
)
def test_embeddings_are_a_400(either: Server, path: str, body: dict) -> None:
    assert requests.post(f"{either.url}/{path}", json=body, timeout=60).status_code == 400
    assert len(ids(either.generate(SHORT, 4))) == 4


@pytest.mark.parametrize("field", ["image_data", "audio_data", "video_data"])
def test_images_audio_and_video_are_a_400(either: Server, field: str) -> None:
    """SGLang itself drops them where the model reads text alone."""
    for text in (SHORT, [SHORT, LONG]):
        response = either.post(4, {}, text=text, **{field: "data:,x"})
        assert response.status_code == 400 and "images, audio and video are not supported" in response.text


def test_images_in_a_chat_are_a_400(either: Server) -> None:
    parts = [{"type": "text", "text": SHORT}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    body = {"model": "default", "messages": [{"role": "user", "content": parts}], "max_tokens": 4}
    response = requests.post(f"{either.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 400 and response.json()["message"]


def test_a_session_continues_where_its_last_turn_ended(either: Server) -> None:
    session = requests.post(f"{either.url}/open_session", json={"capacity_of_str_len": 1000}, timeout=60).json()
    first_prompt, second_prompt = [int(word[1:]) for word in LONG.split()], list(range(40, 52))
    first = either.ask(10, {"ignore_eos": True}, input_ids=first_prompt, session_params={"id": session, "rid": None})
    turn = {"id": session, "rid": first["meta_info"]["id"]}
    second = either.ask(10, {"ignore_eos": True}, input_ids=second_prompt, session_params=turn)
    whole = first_prompt + ids(first) + second_prompt
    assert ids(second) == ids(either.ask(10, {"ignore_eos": True}, input_ids=whole))
    requests.post(f"{either.url}/close_session", json={"session_id": session}, timeout=60)
    gone = either.post(4, {}, input_ids=second_prompt, session_params=turn)
    assert gone.status_code == 400 and "does not exist" in gone.text
