"""A request that cannot be served gets a clear error and costs nobody else anything."""

from __future__ import annotations

import pytest
import requests
from serving import Server
from words import words


@pytest.mark.parametrize(
    "path, body, words_of_the_error",
    [
        ("/v1/completions", {"model": "default", "prompt": words(5000), "max_tokens": 4}, ("context length", "4096")),
        ("/v1/completions", {"model": "default", "prompt": words(10), "max_tokens": -1}, ("max_",)),
        ("/v1/completions", {"model": "default", "prompt": words(10), "temperature": -1}, ("temperature",)),
        ("/v1/chat/completions", {"model": "default", "messages": "no list"}, ("messages",)),
        ("/v1/completions", {"model": "default"}, ("prompt",)),
    ],
)
def test_a_bad_request_gets_a_400_that_says_why(
    server: Server, path: str, body: dict[str, object], words_of_the_error: tuple[str, ...]
) -> None:
    response = requests.post(server.url + path, json=body, timeout=60)
    assert response.status_code == 400, response.text
    assert any(word in response.text for word in words_of_the_error), response.text
    assert len(server.generate(words(100), 4)["text"].split()) == 4
