"""Which tokens a rectifying pass takes: from host numbers alone, bounded, the longest tail first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dustin_sglang.radix import advance_exact, end_exact, exact_len
from dustin_sglang.rectify import MAX_READS, MAX_TOKENS, due_tails


def request(prompt: int, output: int, exact: int | None) -> Any:
    req = SimpleNamespace(origin_input_ids=list(range(prompt)), output_ids=list(range(1000, 1000 + output)))
    if exact is not None:
        end_exact(req, exact)
    return req


def spans(reqs: list[Any], interval: int) -> list[tuple[int, int, int]]:
    return [(tail.index, tail.start, tail.end) for tail in due_tails(reqs, interval)]


def test_a_request_is_due_when_a_whole_interval_is_approximate() -> None:
    reqs = [request(100, 31, 110), request(100, 30, 110)]
    assert spans(reqs, 20) == [(0, 110, 130)]


def test_an_exact_request_is_never_due() -> None:
    assert spans([request(100, 200, None)], 1) == []


def test_only_tokens_that_the_host_knows_are_taken() -> None:
    # Under overlap scheduling the ids of the last round's tokens arrive later than its committed length.
    late = request(100, 27, 110)
    assert spans([late], 17) == []
    assert spans([late], 16) == [(0, 110, 126)]


def test_token_ids_reach_one_beyond_the_positions() -> None:
    (tail,) = due_tails([request(100, 31, 110)], 20)
    assert tail.token_ids == list(range(1010, 1031))


def test_a_pass_is_bounded_and_takes_the_longest_tails_first() -> None:
    lengths = [40, 60, 40, 80, 70]
    reqs = [request(100, n, 100) for n in lengths]
    chosen = spans(reqs, 32)
    assert [index for index, _, _ in chosen] == [3, 4, 1, 0]
    assert sum(end - start for _, start, end in chosen) == MAX_TOKENS


def test_it_takes_half_as_many_tokens_again_as_the_verification_has_rows() -> None:
    reqs = [request(100, 40, 100) for _ in range(8)]
    assert len(due_tails(reqs, 32)) == 4
    assert len(due_tails(reqs, 32, rows=6 * 32 * 2 // 3)) == 6


def test_a_long_interval_is_rewritten_piece_by_piece_and_then_waits_for_the_next() -> None:
    req = request(100, 302, 100)
    pieces = []
    while tails := due_tails([req], 300):
        pieces.append((tails[0].start, tails[0].end))
        advance_exact(req, tails[0].end)
    assert pieces == [(100, 200), (200, 300), (300, 400)]
    req.output_ids += [0] * 298
    assert spans([req], 300) == []
    req.output_ids.append(0)
    assert spans([req], 300) == [(0, 400, 500)]


@pytest.mark.parametrize("context", [10_000, 70_000, 10**7])
def test_over_a_long_context_pieces_are_smaller_and_alone(context: int) -> None:
    reqs = [request(context, 65, context) for _ in range(3)]
    passes = []
    while tails := due_tails(reqs, 64):
        passes.append(tails)
        for tail in tails:
            advance_exact(tail.req, tail.end)
    assert [exact_len(req, context + 64) for req in reqs] == [context + 64] * 3
    for tails in passes:
        reads = sum((tail.end - tail.start) * tail.end for tail in tails)
        assert reads <= MAX_READS or (len(tails), reads) == (1, tails[0].end)  # a single token
    assert len(passes) == {10_000: 2, 70_000: 9, 10**7: 192}[context]


def test_its_pieces_depend_on_a_request_alone() -> None:
    reqs = [request(60_000, 65, 60_000), request(3_000, 65, 3_000)]
    alone = spans(reqs[:1], 64)
    assert alone == [(0, 60_000, 60_032)] and spans(reqs, 64)[0] == alone[0]
