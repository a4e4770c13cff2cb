"""A soak calls what is wrong wrong: answers, near ties, throughput that falls."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import soak
from soak_material import Material
from soak_traffic import Load, Traffic
from soak_verdict import Reference, compare

# At each place its token, 99 and 98; at the last place 99 is as good as the token.
GAPS = ((3.0, 4.0), (0.1, 0.6), (2.0, 2.5), (0.0, 0.5))
IDS = [10, 11, 12, 13]
REFERENCE = Reference([5, 6], IDS, [{own: -1.0, 99: -1 - a, 98: -1 - b} for own, (a, b) in zip(IDS, GAPS, strict=True)])
WELL: dict[str, Any] = dict(leaks=0, wrong=0, errors=0, tok_s_by_minute=[10.0, 11.0, 9.0, 10.0])


def traffic(tie: float) -> Traffic:
    material = Material(tokens=[5, 6, 7], ends=frozenset({2}), forced=9, grammars=[], options=[])
    return Traffic("http://nowhere", material, Load(budget=64, context=64, slots=128, running=4, tie=tie))


def answer(ids: list[int], cached: int = 0, retractions: int = 0) -> dict[str, Any]:
    return dict(output_ids=ids, meta_info=dict(cached_tokens=cached, num_retractions=retractions))


@pytest.mark.parametrize(
    "got, tie, wrong, near_ties",
    [
        ([10, 11, 12, 13], 0.0, 0, 0),
        ([10, 99, 12, 13], 0.125, 0, 1),  # the two best were 0.1 nats apart there
        ([10, 99, 12, 13], 0.05, 1, 0),
        ([10, 11, 99, 13], 0.125, 1, 0),
        ([10, 98, 12, 13], 0.125, 1, 0),  # the second best was near, but not this one
        ([10, 97, 12, 13], 0.125, 1, 0),  # further than the last that is known
        ([10, 99, 12, 13], 0.1 - 1e-5, 0, 1),  # a difference of two rounded numbers
        ([10, 11, 12], 0.125, 1, 0),  # too short, and no other token
        ([10, 11, 12, 13, 14], 0.125, 1, 0),
    ],
)
def test_an_answer_leaves_its_reference_at_a_near_tie_only(
    got: list[int], tie: float, wrong: int, near_ties: int
) -> None:
    seen = traffic(tie)
    seen._compare(REFERENCE, REFERENCE.ids, answer(got))
    assert (len(seen.wrong), seen.counts["near_ties"]) == (wrong, near_ties)


def test_a_difference_tells_where_it_is_and_how_the_request_was_served() -> None:
    seen = traffic(0.125)
    seen._compare(REFERENCE, IDS, answer([10, 11, 99, 13], cached=1, retractions=2))
    (difference,) = seen.differences
    row = dict(prompt=2, at=2, gap=2.0, float32_gap=0.5, cached_tokens=1, retractions=2, wrong=True)
    assert difference.row(0.125, 0.5) == row
    assert "token 2, gap 2.0, 1 tokens cached, 2 retractions" in seen.wrong[0]
    assert (seen.counts["exact_uncached"], seen.counts["exact_retracted"]) == (0, 1)
    shorter = compare(REFERENCE, IDS, answer(IDS[:3]))
    assert shorter is not None and shorter.row(0.125, None)["at"] is None and "another length" in str(shorter)
    assert compare(REFERENCE, IDS[:3], answer(IDS[:3])) is None


def test_stock_speculation_gets_the_same_traffic_without_our_options(capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--model", "m", "--draft", "d", "--context", "1000"]
    command = soak.launch(*soak.parse([*models, "--algorithm", "STANDALONE"]))
    assert command[command.index("--speculative-algorithm") + 1] == "STANDALONE"
    assert not any("dustin" in option for option in command if option.startswith("--"))
    ours, stock = (soak.make_load(soak.parse([*models, "--algorithm", name])[0]) for name in soak.ALGORITHMS)
    assert dataclasses.replace(stock, stock=False) == ours
    with pytest.raises(SystemExit):
        soak.parse([*models, "--algorithm", "STANDALONE", "--dustin-mass", "0.9"])
    assert "has no --dustin-mass" in capsys.readouterr().err


def test_prompts_are_read_in_a_circle() -> None:
    assert traffic(0).material.prompt(2, 5) == [7, 5, 6, 7, 5]


def test_tokens_are_counted_by_whole_minutes() -> None:
    tokens = [(100.0, 6), (159.9, 6), (160.0, 30), (219.0, 30), (221.0, 1000)]
    assert soak.by_minute(tokens, start=100.0, end=225.0) == [0.2, 1.0]


@pytest.mark.parametrize(
    "changes, fault",
    [
        ({}, None),
        ({"leaks": 1}, "leaks: 1"),
        ({"wrong": 2}, "wrong: 2"),
        ({"errors": 3}, "errors: 3"),
        ({"tok_s_by_minute": [10.0, 10.0, 10.0, 4.0]}, "throughput has fallen"),
        ({"tok_s_by_minute": [10.0, 10.0, 4.0]}, None),  # too short to tell
    ],
)
def test_what_a_soak_must_not_show(changes: dict[str, Any], fault: str | None) -> None:
    found = soak.faults(WELL | changes)
    assert len(found) == (fault is not None) and all(fault in text for text in found if fault)


def test_the_pool_must_hold_the_longest_request(capsys: pytest.CaptureFixture[str]) -> None:
    models = ["--model", "m", "--draft", "d", "--context", "1000"]
    with pytest.raises(SystemExit):
        soak.parse([*models, "--max-total-tokens", "999"])
    assert "--max-total-tokens 999: at least --context, which is 1000" in capsys.readouterr().err
    args, extra = soak.parse([*models, "--dustin-rectify-interval", "64"])
    assert args.max_total_tokens == 2000 and extra == ["--dustin-rectify-interval", "64"]
