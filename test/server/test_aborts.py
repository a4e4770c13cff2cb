"""An abort at every stage of a request: waiting, prefilling, decoding, streaming; and afterwards nothing is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import requests
from serving import Server
from test_concurrency import idle
from words import words


class Asked(threading.Thread):
    """One request in a thread of its own."""

    def __init__(self, server: Server, rid: str, prompt: str, new_tokens: int) -> None:
        super().__init__(daemon=True)
        self.ask = lambda: server.post(new_tokens, {"ignore_eos": True}, text=prompt, rid=rid)
        self.response: requests.Response | None = None
        self.start()

    def run(self) -> None:
        self.response = self.ask()

    def reason(self) -> dict:
        self.join(60)
        assert self.response is not None, "no answer came"
        return self.response.json()["meta_info"]["finish_reason"]


def abort(server: Server, rid: str) -> None:
    assert requests.post(f"{server.url}/abort_request", json={"rid": rid}, timeout=30).ok


@pytest.fixture
def baseline(either: Server) -> Iterator[None]:
    """The pools before the test are the pools after it."""
    before = idle(either)
    yield
    assert idle(either) == before
    assert len(either.generate(words(100), 8)["output_ids"]) == 8


@pytest.mark.usefixtures("baseline")
def test_in_the_first_moments_of_a_long_prompt(either: Server) -> None:
    for delay in (0, 0.02, 0.1, 0.3):  # still waiting, in the prefill, between the prefill and the first verification
        asked = Asked(either, f"early {delay}", words(3000, first=int(delay * 100)), 900)
        time.sleep(delay)
        abort(either, f"early {delay}")
        time.sleep(0.2)
        abort(either, f"early {delay}")  # the first may have come before the request
        assert asked.reason()["type"] == "abort"


@pytest.mark.usefixtures("baseline")
def test_while_it_waits_for_room(either: Server) -> None:
    running = [Asked(either, f"running {i}", words(2500, first=i), 1500) for i in range(4)]
    time.sleep(0.5)
    waiting = Asked(either, "waiting", words(2500, first=9), 400)  # the pool holds three of them
    time.sleep(0.5)
    abort(either, "waiting")
    assert waiting.reason()["type"] == "abort"
    for i, asked in enumerate(running):
        abort(either, f"running {i}")
        assert asked.reason()["type"] == "abort"


@pytest.mark.usefixtures("baseline")
def test_all_at_once(either: Server) -> None:
    asked = [Asked(either, f"all {i}", words(100 + 10 * i), 2000) for i in range(4)]
    time.sleep(1)
    assert requests.post(f"{either.url}/abort_request", json={"abort_all": True}, timeout=30).ok
    assert [request.reason()["type"] for request in asked] == ["abort"] * 4
