"""Rectification and the monitor in a server of two ranks: `meta_info`, also of a stream, counters and the log."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import requests
from serving import Server, serve
from words import words

NEW_TOKENS = 48


@pytest.fixture(scope="module")
def monitored(tiny: dict[str, str]) -> Iterator[Server]:
    # A whole-model draft with the target's head counts, which two ranks divide.
    arguments = ["--model-path", tiny["target"], "--speculative-draft-model-path", tiny["target"], "--tp-size", "2"]
    arguments += ["--speculative-algorithm", "dustin", "--dustin-budget", "64", "--dustin-window", "16"]
    arguments += ["--dustin-rectify-interval", "8", "--dustin-monitor-interval", "1", "--dustin-dense-fallback", "1.0"]
    binding = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with serve(*arguments, "--max-total-tokens", "8192", "--enable-metrics", env=binding) as running:
        yield running


def test_the_start_up_line_says_so(monitored: Server) -> None:
    (line,) = (text for text in monitored.log.read_text().splitlines() if "dustin: policy" in text)
    assert "the rest every 8 tokens" in line
    assert line.endswith("; monitored: one of 1 sparse verifications, dense below an agreement of 1")


def test_answers_carry_the_agreement_of_each_token(monitored: Server) -> None:
    before = monitored.metrics()
    meta = monitored.generate(words(300, first=3), NEW_TOKENS, ignore_eos=True)["meta_info"]
    after = monitored.metrics()
    agreement, dense = meta["dustin_agreement"], meta["dustin_dense"]
    assert len(agreement) == len(dense) == NEW_TOKENS
    assert agreement[0] is None and 0 <= agreement[-1] < 1
    # With a threshold of 1 the first disagreement among enough tokens ends sparse reading, for good.
    assert dense[0] is False and dense[-1] is True and dense == sorted(dense)
    assert monitored.log.read_text().count("is verified densely from now on") == 1, "one rank says it"

    def grown(name: str) -> float:
        return after[f"dustin:{name}_total"] - before.get(f"dustin:{name}_total", 0.0)

    assert grown("dense_fallbacks") == 1
    assert grown("monitored_request_steps") == grown("sparse_verify_steps") < grown("verify_steps")
    assert 0 <= grown("agreeing_tokens") < grown("compared_tokens") < NEW_TOKENS
    assert grown("rectified_tokens") == 8 * grown("rectifications") >= NEW_TOKENS - 8 - 8


def test_a_stream_says_the_same(monitored: Server) -> None:
    prompt = words(300, first=29)
    body = dict(text=prompt, sampling_params=dict(temperature=0, max_new_tokens=NEW_TOKENS, ignore_eos=True))
    with requests.post(f"{monitored.url}/generate", json=body | {"stream": True}, stream=True, timeout=120) as response:
        lines = [line.removeprefix(b"data: ") for line in response.iter_lines() if line.startswith(b"data: {")]
    final = json.loads(lines[-1])["meta_info"]
    assert len(lines) > 3 and final["completion_tokens"] == NEW_TOKENS
    assert len(final["dustin_agreement"]) == len(final["dustin_dense"]) == NEW_TOKENS
    assert final["dustin_dense"] == sorted(final["dustin_dense"])
