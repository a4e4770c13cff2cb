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


def test_a_pass_waits_until_a_request_has_a_whole_interval() -> None:
    assert spans([request(100, 30, 110)], [129], 20) == []
    assert spans([request(100, 31, 110)], [130], 20) == [(0, 110, 130)]


def test_who_has_half_an_interval_goes_along_with_all_that_it_has() -> None:
    reqs = [request(100, n, 110) for n in (20, 31, 21, 34)]
    assert spans(reqs, [99 + len(req.output_ids) for req in reqs], 20) == [(3, 110, 133), (1, 110, 130), (2, 110, 120)]


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
    reqs = [request(100, n, 99) for n in lengths]
    chosen = spans(reqs, [99 + n for n in lengths], 128)
    # 190 and 180 leave room for 142 of 170, which is half an interval at least, and then for nobody.
    assert chosen == [(3, 99, 289), (4, 99, 279), (1, 99, 241)]
    assert sum(end - start for _, start, end in chosen) == MAX_TOKENS


def test_the_room_that_is_left_is_not_filled_with_scraps() -> None:
    reqs = [request(100, n, 99) for n in (300, 190, 120)]
    assert [index for index, _, _ in spans(reqs, [399, 289, 219], 128)] == [0, 1]
