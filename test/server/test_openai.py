"""OpenAI clients: chat, completion, streaming, stop strings, max_tokens."""

from __future__ import annotations

import openai
import pytest
from serving import Server
from words import words


@pytest.fixture
def client(either: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{either.url}/v1", api_key="none")


def complete(client: openai.OpenAI, prompt: str, tokens: int, **kwargs: object) -> openai.types.Completion:
    return client.completions.create(model="default", prompt=prompt, max_tokens=tokens, temperature=0, **kwargs)


def test_completion_answers_and_counts(client: openai.OpenAI) -> None:
    answer = complete(client, words(120), 20)
    assert answer.usage.prompt_tokens in (120, 121) and answer.usage.completion_tokens == 20
    assert answer.choices[0].finish_reason == "length"
    assert 17 <= len(answer.choices[0].text.split()) <= 20  # special tokens have no text


def test_streaming_gives_the_same_text(client: openai.OpenAI) -> None:
    whole = complete(client, words(120), 20).choices[0].text
    parts = [chunk.choices[0].text for chunk in complete(client, words(120), 20, stream=True) if chunk.choices]
    assert "".join(parts) == whole and len(parts) > 3


def test_chat_answers(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": words(100)}]
    answer = client.chat.completions.create(model="default", messages=messages, max_tokens=12, temperature=0)
    assert answer.usage.completion_tokens == 12 and answer.choices[0].message.content


@pytest.mark.parametrize("at", [2, 3, 4, 5])
def test_a_stop_string_ends_the_answer_wherever_in_an_accepted_run_it_comes(client: openai.OpenAI, at: int) -> None:
    text = complete(client, words(120), 20).choices[0].text.split()
    stop = text[at]
    answer = complete(client, words(120), 20, stop=[stop]).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.text.split() == text[: text.index(stop)]


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_max_tokens_is_met_exactly(client: openai.OpenAI, tokens: int) -> None:
    assert complete(client, words(120), tokens).usage.completion_tokens == tokens
