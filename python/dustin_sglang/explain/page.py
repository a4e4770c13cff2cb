"""The page: one HTML file that needs nothing else, its first round drawn without a script.

The other rounds are JSON, a character a position, which `page.js` draws in the same way: neighbours alike share one
element, so that a long prompt is some hundred elements.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from dustin_sglang.explain.heat import LEVELS, heat
from dustin_sglang.explain.plot import plot, x_of
from dustin_sglang.explain.prompt import PART_OF_CHARACTER
from dustin_sglang.explain.rounds import Decoded, Round
from dustin_sglang.explain.sources import BOTH, LOOKAHEAD, PROTECTED, REST, UNLISTED
from dustin_sglang.explain.stability import with_first, with_previous
from dustin_sglang.selection.policies import Budget

_FOLDER = Path(__file__).parent
_KINDS = {
    "known": "known before the round",
    "accepted": "drafted, accepted",
    "rejected": "drafted, rejected",
    "target": "the target's next token",
}
_LINE_BREAK = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"  # so that a listed line break can be seen
_LEAST_STRIP = 1000  # parts of the strip's width that a run is drawn as, at least


@dataclass(frozen=True)
class Subject:
    """What a page is about.

    Attributes
    ----------
    decoded
        The request.
    pieces
        Text of each of its tokens.
    verified
        For each round the texts of the verified tokens and of the target's next one.
    budget
        As the policy divides it.
    facts
        What was run, name to value, for the head of the page.
    """

    decoded: Decoded
    pieces: list[str]
    verified: list[list[str]]
    budget: Budget
    facts: Mapping[str, str]


def render(subject: Subject) -> str:
    """Return the page as HTML."""
    decoded, first = subject.decoded, subject.decoded.rounds[0]
    pieces = [_visible(piece) for piece in subject.pieces]
    verified = [_kinds(one, texts) for one, texts in zip(decoded.rounds, subject.verified, strict=True)]
    names = source_names(subject.budget)
    count = len(decoded.rounds)
    data = {
        "pieces": pieces,
        "prompt": decoded.prompt_tokens,
        "names": names,
        "kinds": _KINDS,
        "rounds": [
            _round_data(one, spans, x_of(i, count)) for i, (one, spans) in enumerate(zip(decoded.rounds, verified))
        ],
    }
    body = [
        _head(subject),
        _controls(first, count),
        _legend(first, names),
        _verified(verified[0], pieces[decoded.prompt_tokens : first.length + 1]),
        _text(first, pieces),
        _stability(decoded.rounds),
        f'<script type="application/json" id="data">{_json(data)}</script>',
        f"<script>{(_FOLDER / 'page.js').read_text(encoding='utf-8')}</script>",
    ]
    style = (_FOLDER / "page.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<title>What sparse verification reads</title>"
        f"<style>\n{style}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def source_names(budget: Budget) -> dict[str, str]:
    """What a legend calls each source that a policy with this budget can have."""
    names = {PROTECTED: f"protected: first {budget.sinks}, last {budget.window}"}
    if budget.lookahead:
        names[LOOKAHEAD] = "lookahead"
        if budget.left and budget.rest == "history":
            names[BOTH] = "lookahead, and history alone would have chosen it too"
    if budget.left:
        names[REST] = budget.rest
    return names


def _visible(piece: str) -> str:
    return piece.replace("\n", f"{_LINE_BREAK}\n")


def _json(data: object) -> str:
    """Compact JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _round_data(one: Round, verified: list[tuple[str, str]], x: float) -> dict[str, object]:
    scores = {name: heat(value) for name in ("lookahead", "history") if (value := getattr(one, name)) is not None}
    return {"n": one.length, "x": round(x, 1), "list": one.marks, "verified": verified, **scores}


def _kinds(one: Round, texts: Sequence[str]) -> list[tuple[str, str]]:
    rejected = len(texts) - 2 - one.accepted
    kinds = ["known", *["accepted"] * one.accepted, *["rejected"] * rejected, "target"]
    return [(text.replace("\n", _LINE_BREAK), kind) for text, kind in zip(texts, kinds, strict=True)]


def _runs(marks: str) -> list[tuple[int, int, str]]:
    """Half-open ranges of equal neighbours, with their mark."""
    found, start = [], 0
    for mark, group in groupby(marks):
        end = start + len(list(group))
        found.append((start, end, mark))
        start = end
    return found


def _span(text: str, name: str, title: str = "") -> str:
    attribute = f' title="{html.escape(title)}"' if title else ""
    return f'<span class="{name}"{attribute}>{html.escape(text)}</span>'


def _head(subject: Subject) -> str:
    facts = "; ".join(f"{html.escape(name)} {html.escape(value)}" for name, value in subject.facts.items())
    return (
        f"<header><h1>What sparse verification reads</h1><p>{facts}.</p>"
        '<p class="note">Rounds as a server runs them: the draft proposes a chain, the signals choose a list, the '
        "target verifies. Here the target verifies densely: answer and KV are those of dense greedy decoding, and the "
        "list is what a sparse verification would have read at this point.</p></header>"
    )


def _controls(first: Round, count: int) -> str:
    views = {"list": "list", "lookahead": "lookahead scores", "history": "history scores"}
    radios = "".join(
        f'<label><input type="radio" name="view" value="{view}"{" checked" if view == "list" else ""}> {name}</label>'
        for view, name in views.items()
        if view == "list" or getattr(first, view) is not None
    )
    return (
        f'<div id="controls"><p><output id="where" for="round">Round 1 of {count}, {first.length} committed tokens'
        '</output></p><div class="script"><label for="round">Round</label>'
        f'<input type="range" id="round" min="1" max="{count}" value="1">'
        '<button type="button" id="play">Play</button>'
        f"<fieldset><legend>Shade by</legend>{radios}</fieldset></div>"
        "<noscript><p>Without JavaScript this page shows the first round only.</p></noscript></div>"
    )


def _legend(first: Round, names: Mapping[str, str]) -> str:
    listed = len(first.marks) - first.marks.count(UNLISTED)
    rows = "".join(
        f'<tr><td><span class="swatch {mark}"></span>{html.escape(name)}</td>'
        f'<td class="number" id="count-{mark}">{first.marks.count(mark)}</td>'
        f'<td class="number" id="share-{mark}">{first.marks.count(mark) / listed:.1%}</td></tr>'
        for mark, name in names.items()
    )
    heat_steps = "".join(f'<span class="swatch h{level}"></span>' for level in range(1, LEVELS))
    return (
        '<h2>Who chose</h2><table><thead><tr><th>source</th><th class="number">positions</th>'
        f'<th class="number">share</th></tr></thead><tbody>{rows}<tr><td>listed</td>'
        f'<td class="number" id="listed">{listed}</td>'
        f'<td class="number" id="share">{listed / len(first.marks):.1%} of the context</td></tr></tbody></table>'
        f'<p class="note script">Scores: <span aria-hidden="true">{heat_steps}</span> from the mean over the context '
        "upwards, twice as much at each step; white is below the mean.</p>"
    )


def _verified(spans: Sequence[tuple[str, str]], answer: Sequence[str]) -> str:
    drawn = "".join(_span(text, kind, _KINDS[kind]) for text, kind in spans)
    key = ", ".join(_span(name, kind) for kind, name in _KINDS.items())
    return (
        f'<h2>Under verification</h2><p class="note">{key}</p><div id="verified">{drawn}</div>'
        f'<h2>Answer so far</h2><div id="answer">{html.escape("".join(answer))}</div>'
    )


def _text(first: Round, pieces: Sequence[str]) -> str:
    runs, total = _runs(first.marks), len(pieces)
    drawn = "".join(
        html.escape("".join(pieces[start:end]))
        if mark == UNLISTED
        else _span("".join(pieces[start:end]), mark, f"{start} to {end - 1}")
        for start, end, mark in runs
    )
    rects = "".join(
        f'<rect class="{mark}" x="{start}" width="{max(end - start, total / _LEAST_STRIP):g}" height="1"/>'
        for start, end, mark in runs
        if mark != UNLISTED
    )
    return (
        '<h2>The context</h2><p class="note">The strip shows where listed positions lie, from the first token to the '
        f"last; the text shows them as tokens. {_LINE_BREAK} is a line break, {PART_OF_CHARACTER} a part of the next "
        "character."
        '<span class="script"> A click on the strip shows that place.</span></p>'
        f'<svg id="strip" role="img" aria-label="listed positions from the first to the last token" '
        f'viewBox="0 0 {total} 1" preserveAspectRatio="none">{rects}</svg>'
        f'<div id="text" tabindex="0" role="region" aria-label="the context with shaded positions">{drawn}</div>'
    )


def _stability(rounds: Sequence[Round]) -> str:
    lists = [one.marks for one in rounds]
    lines: dict[str, Sequence[float | None]] = {
        "overlap with the previous list": with_previous(lists),
        "overlap with the first list": with_first(lists),
        "captured mass": [one.captured_mass for one in rounds],
    }
    keys = " ".join(
        f'<svg class="key line-{number}" viewBox="0 0 40 12"><line x1="0" x2="40" y1="6" y2="6"/></svg>{name}&emsp;'
        for number, name in enumerate(lines)
    )
    return (
        f"<h2>Stability over rounds</h2><p>{keys}</p>{plot(lines, 'overlap of lists and captured mass by round')}"
        '<p class="note">Overlap: the share of a round\'s chosen positions, protected ones left out, that the other '
        "list holds too. Captured mass: the dense verification's attention on the list, over all layers and heads of "
        "the target, between the protected ends; 100% is what the best single list of that size holds.</p>"
    )
