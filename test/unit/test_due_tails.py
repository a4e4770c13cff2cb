"""Which tokens a rectifying pass takes: from host numbers alone, bounded, the longest tail first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dustin_sglang.radix import advance_exact
from dustin_sglang.rectify import MAX_TOKENS, due_tails


def request(prompt: int, output: int, exact: int | None) -> Any:
    req = SimpleNamespace(origin_input_ids=list(range(prompt)), output_ids=list(range(1000, 1000 + output)))
    if exact is not None:
        advance_exact(req, exact)
    return req


def spans(reqs: list[Any], seq_lens: list[int], interval: int) -> list[tuple[int, int, int]]:
    return [(tail.index, tail.start, tail.end) for tail in due_tails(reqs, seq_lens, interval)]


def test_a_request_is_due_when_a_whole_interval_is_approximate() -> None:
    reqs = [request(100, 31, 110), request(100, 30, 110)]
    assert spans(reqs, [130, 129], 20) == [(0, 110, 130)]


def test_an_exact_request_is_never_due() -> None:
    assert spans([request(100, 200, None)], [299], 1) == []


def test_only_tokens_that_the_host_knows_are_taken() -> None:
    # Under overlap scheduling the ids of the last round's tokens arrive later than its committed length.
    late = request(100, 27, 110)
    assert spans([late], [130], 17) == []
    assert spans([late], [130], 16) == [(0, 110, 126)]


def test_token_ids_reach_one_beyond_the_positions() -> None:
    (tail,) = due_tails([request(100, 31, 110)], [130], 20)
    assert tail.token_ids == list(range(1010, 1031))


def test_a_pass_is_bounded_and_takes_the_longest_tails_first() -> None:
    lengths = [150, 170, 150, 190, 180]
    reqs = [request(100, n, 100) for n in lengths]
    chosen = spans(reqs, [99 + n for n in lengths], 128)
    assert [index for index, _, _ in chosen] == [3, 4, 1, 0]
    assert sum(end - start for _, start, end in chosen) == MAX_TOKENS
