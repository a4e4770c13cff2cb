"""A soak calls what is wrong wrong: answers, near ties, throughput that falls."""

from __future__ import annotations

from typing import Any

import pytest
import soak
from soak_material import Material
from soak_traffic import Load, Reference, Traffic

REFERENCE = Reference(prompt=[5, 6], ids=[10, 11, 12, 13], gaps=[3.0, 0.1, 2.0, 0.0])
WELL: dict[str, Any] = dict(leaks=0, wrong=0, errors=0, tok_s_by_minute=[10.0, 11.0, 9.0, 10.0])


def traffic(tie: float) -> Traffic:
    material = Material(tokens=[5, 6, 7], ends=frozenset({2}), forced=9, grammars=[], options=[])
    return Traffic("http://nowhere", material, Load(budget=64, context=64, slots=128, running=4, tie=tie))


@pytest.mark.parametrize(
    "got, tie, wrong, near_ties",
    [
        ([10, 11, 12, 13], 0.0, 0, 0),
        ([10, 99, 12, 13], 0.125, 0, 1),  # the two best were 0.1 nats apart there
        ([10, 99, 12, 13], 0.05, 1, 0),
        ([10, 11, 99, 13], 0.125, 1, 0),
        ([10, 11, 12], 0.125, 1, 0),  # too short, and no other token
        ([10, 11, 12, 13, 14], 0.125, 1, 0),
    ],
)
def test_an_answer_leaves_its_reference_at_a_near_tie_only(
    got: list[int], tie: float, wrong: int, near_ties: int
) -> None:
    seen = traffic(tie)
    seen._compare(REFERENCE, REFERENCE.ids, got)
    assert (len(seen.wrong), seen.counts["near_ties"]) == (wrong, near_ties)


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
