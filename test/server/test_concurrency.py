"""Several clients at once, aborts in mid-stream, and everything given back afterwards."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import requests
from serving import Server
from words import words


def idle(server: Server) -> dict[str, float]:
    """The pool's gauges once the server has been idle for a moment and its cache is flushed."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if requests.post(f"{server.url}/flush_cache", timeout=30).ok:
            break
        time.sleep(0.5)
    server.generate(words(4), 1)  # gauges are written with a batch
    requests.post(f"{server.url}/flush_cache", timeout=30)
    info = requests.get(f"{server.url}/server_info", timeout=30).json()
    return info["internal_states"][0]["memory_usage"] | {
        "load": requests.get(f"{server.url}/get_load").json()[0]["num_tokens"]
    }


def test_clients_beside_each_other_get_what_they_get_alone(either: Server) -> None:
    """Of arXiv 2510.22876: batched speculation that is silently wrong where accepted runs have different lengths."""
    prompts = [words(20 + 40 * i, first=i) for i in range(6)]
    alone = [either.generate(prompt, 24)["text"] for prompt in prompts]
    requests.post(f"{either.url}/flush_cache", timeout=30)
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda prompt: either.generate(prompt, 24)["text"], prompts))
    assert together == alone


def test_an_abort_in_mid_stream_leaves_nothing_behind(either: Server) -> None:
    """sglang-jax #1147: pages that every request leaks."""
    before = idle(either)
    for _ in range(3):
        body = dict(
            text=words(150), sampling_params=dict(temperature=0, max_new_tokens=2000, ignore_eos=True), stream=True
        )
        with requests.post(f"{either.url}/generate", json=body, stream=True, timeout=60) as response:
            next(response.iter_lines())  # the answer has begun; leaving the block closes the connection
    assert len(either.generate(words(100), 8)["text"].split()) == 8
    assert idle(either) == before


def test_an_abort_by_id_ends_only_that_request(either: Server) -> None:
    results: dict[str, dict] = {}

    def run(rid: str, new_tokens: int) -> None:
        body = dict(
            rid=rid, text=words(150), sampling_params=dict(temperature=0, max_new_tokens=new_tokens, ignore_eos=True)
        )
        results[rid] = requests.post(f"{either.url}/generate", json=body, timeout=120).json()

    threads = [threading.Thread(target=run, args=args) for args in (("long", 2000), ("short", 40))]
    for thread in threads:
        thread.start()
    time.sleep(1)
    requests.post(f"{either.url}/abort_request", json={"rid": "long"}, timeout=30)
    for thread in threads:
        thread.join()
    assert results["long"]["meta_info"]["finish_reason"]["type"] == "abort"
    assert results["short"]["meta_info"]["completion_tokens"] == 40
