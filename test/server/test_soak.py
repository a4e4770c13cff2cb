"""Ten minutes of mixed traffic, and the death of a scheduler; slow, so `./run test --slow`."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import psutil
import pytest
import requests
from serving import Server, serve
from test_concurrency import idle
from words import words

SECONDS, CLIENTS, WINDOWS = int(os.environ.get("DUSTIN_SOAK_SECONDS", "600")), 4, 6
BUDGET = 512
# SGLang counts its pools after every batch, not only when it is idle, and stops at the first difference.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}


def arguments(tiny: dict[str, str], draft: str, page_size: int) -> list[str]:
    models = ["--model-path", tiny["target"], "--speculative-draft-model-path", tiny[draft]]
    options = ["--speculative-algorithm", "dustin", "--dustin-budget", str(BUDGET), "--page-size", str(page_size)]
    # A chunk of a prompt at a time, and a pool that holds about four requests: prefills mix with decodes, some retract.
    return [
        *models,
        *options,
        "--max-total-tokens",
        "4096",
        "--chunked-prefill-size",
        "256",
        "--max-running-requests",
        "4",
    ]


@dataclass
class Traffic:
    """What the clients saw."""

    server: Server
    expected: dict[tuple[int, int], list[int]]
    end: float
    tokens: list[tuple[float, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def client(self, seed: int) -> None:
        draw = random.Random(seed)
        kinds: list[Callable[[random.Random], None]] = [self.exact, self.exact, self.sparse, self.left, self.bad]
        while time.monotonic() < self.end and not self.wrong:
            draw.choice(kinds)(draw)

    def exact(self, draw: random.Random) -> None:
        """A greedy request within the budget, against its solo run."""
        key = draw.choice(list(self.expected))
        answer = self.server.generate(words(key[0], first=key[1]), 40, ignore_eos=True)
        if answer["output_ids"] != self.expected[key]:
            self.wrong.append(f"{key}: {answer['output_ids']} and not {self.expected[key]}")
        self.done(answer)

    def sparse(self, draw: random.Random) -> None:
        """A sampled or greedy request beyond the budget; its length is all that is known."""
        new_tokens = draw.randrange(1, 60)
        prompt = words(draw.randrange(520, 700), first=draw.randrange(250))
        options = draw.choice([{}, {"temperature": 1, "top_p": 0.9}, {"frequency_penalty": 1}, {"stop": ["w77"]}])
        answer = self.server.generate(prompt, new_tokens, **options)
        if not 1 <= len(answer["output_ids"]) <= new_tokens:
            self.wrong.append(f"{len(answer['output_ids'])} tokens, not {new_tokens}")
        self.done(answer)

    def left(self, draw: random.Random) -> None:
        """A client that goes away in mid-stream."""
        body = {"text": words(draw.randrange(20, 700)), "stream": True}
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": 500, "ignore_eos": True}
        with requests.post(f"{self.server.url}/generate", json=body, stream=True, timeout=120) as response:
            next(response.iter_lines())
            time.sleep(draw.random() / 2)

    def bad(self, draw: random.Random) -> None:
        sampling = draw.choice([{"min_p": 0.1, "temperature": 1}, {"regex": "(w1"}, {"max_new_tokens": 10**6}])
        if (status := self.server.post(8, sampling, text=words(30)).status_code) != 400:
            self.wrong.append(f"{sampling}: {status}")

    def done(self, answer: dict) -> None:
        self.tokens.append((time.monotonic(), len(answer["output_ids"])))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 600)
@pytest.mark.parametrize(("draft", "page_size", "share"), [("draft", 1, 0.5), ("draft", 64, 0.2), ("eagle", 16, 0.3)])
def test_ten_minutes_without_a_leak_a_wrong_answer_or_a_slowdown(
    tiny: dict[str, str], draft: str, page_size: int, share: float
) -> None:
    """SGLang #13741 and PR #13826, sglang-jax #1147, SGLang #27789 and the comment on PR #10090.

    Slots lost a request at larger pages, under load or after a thousand requests; and merging batches that died at
    fifty clients.
    """
    with serve(*arguments(tiny, draft, page_size), env=STRICT) as server:
        keys = [(length, first) for length in (5, 60, 200, 430) for first in range(3)]
        expected = {(n, f): server.generate(words(n, first=f), 40, ignore_eos=True)["output_ids"] for n, f in keys}
        before, rss = idle(server), memory(server.pid)
        start = time.monotonic()
        traffic = Traffic(server, expected, start + SECONDS * share)
        with ThreadPoolExecutor(CLIENTS) as pool:
            for finished in [pool.submit(traffic.client, seed) for seed in range(CLIENTS)]:
                finished.result()
        assert not traffic.wrong, traffic.wrong
        assert idle(server) == before, "every slot is back"
        assert memory(server.pid) < rss + (200 << 20)
        window = SECONDS * share / WINDOWS
        rates = [0] * WINDOWS
        for when, count in traffic.tokens:
            rates[min(WINDOWS - 1, int((when - start) / window))] += count
        print(f"\n{draft} page {page_size}: {len(traffic.tokens)} requests, tokens a window {rates}")
        assert min(rates[-2:]) > 0.5 * statistics.median(rates), rates
        assert "Traceback" not in server.log.read_text()


def memory(pid: int) -> int:
    """Resident bytes of a process tree."""
    parent = psutil.Process(pid)
    return sum(process.memory_info().rss for process in [parent, *parent.children(recursive=True)])


@pytest.mark.slow
def test_a_killed_scheduler_is_a_loud_end_and_the_next_start_is_clean(tiny: dict[str, str]) -> None:
    prompt = words(600)
    with serve(*arguments(tiny, "draft", 1)) as server:
        answer = server.generate(prompt, 20)["output_ids"]
        scheduler = next(p for p in psutil.Process(server.pid).children(recursive=True) if "scheduler" in p.name())
        with ThreadPoolExecutor(1) as pool:
            hanging = pool.submit(server.post, 1500, {"ignore_eos": True}, text=prompt)
            time.sleep(1)
            scheduler.kill()
            with pytest.raises(requests.RequestException):  # the client is not left waiting
                hanging.result(timeout=60).raise_for_status()
        status = psutil.Process(server.pid).wait(60)
        assert status not in (None, 0), "the launcher ends, and not as if all were well"
        assert f"scheduler_0 (pid={scheduler.pid}) crashed with exit code -9" in server.log.read_text()
    with serve(*arguments(tiny, "draft", 1)) as server:
        assert server.generate(prompt, 20)["output_ids"] == answer
