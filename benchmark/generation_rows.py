"""From answers to rows: scores beside dense on the same items, accept length, drift, and their intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from generation_answers import BUCKET, DENSE, Answer, Answers, Setting
from generation_items import Item
from generation_metrics import score
from generation_ruler import TASKS as RULER_TASKS
from quality_statistics import Bootstrap
from results import Row

from dustin_sglang.selection.policies import POLICIES

KEY = ("model", "draft", "task", "context", "k", "policy", "groups", "profile", "rectify_interval", "steps", "topk")
AVERAGE = "ruler"  # name of the row that averages RULER's tasks
REPEATED = 16  # tokens that recur together where an answer repeats itself
_SCORE, _DENSE, _TOKENS, _VERIFICATIONS, _DENSE_TOKENS, _DENSE_VERIFICATIONS = range(6)


def make_rows(items: Sequence[Item], answers: Answers, seed: int) -> Iterator[tuple[int, Row]]:
    """Rows of every setting, task and context that has answers, each with the number of its run.

    A setting is compared with dense on the items that both have answered; if dense answered none, what compares is
    null.
    A row's run is the newest that gave one of its answers.
    """
    dense = answers.of(DENSE)
    for name in answers.settings():
        found = answers.of(name)
        groups: dict[tuple[str, int], list[Item]] = {}
        for item in items:
            if item.id in found and (item.id in dense or not dense):
                groups.setdefault((item.task, item.context), []).append(item)
        tables = {place: _table(some, found, dense) for place, some in groups.items()}
        for (task, context), some in groups.items():
            run = max(found[item.id][0] for item in some)
            fields = summarise([tables[task, context]], seed)
            pairs = [(found[item.id][1], dense[item.id][1] if dense else None) for item in some]
            drift = _drift(pairs, seed) if some[0].ignore_eos else {}
            row = _key(answers, name, run, task, context) | fields | drift
            yield run, row | dict(ci=fields["ci"] | drift.get("ci", {}))
        for context in dict.fromkeys(context for _, context in groups):
            parts = {task: tables[task, where] for task, where in tables if where == context and task in RULER_TASKS}
            if len(parts) > 1:
                run = max(found[item.id][0] for task in parts for item in groups[task, context])
                row = _key(answers, name, run, AVERAGE, context) | summarise(list(parts.values()), seed)
                yield run, row | dict(tasks=list(parts))


def _table(
    items: Sequence[Item], found: Mapping[str, tuple[int, Answer]], dense: Mapping[str, tuple[int, Answer]]
) -> np.ndarray:
    """Values ``[items, 6]``, NaN where there are none."""
    rows = []
    for item in items:
        pair = [found[item.id][1], dense[item.id][1] if item.id in dense else None]
        scores = [None if answer is None else score(item, answer.text) for answer in pair]
        counts = [n for a in pair for n in ((len(a.ids), a.verifications) if a else (None, None))]
        rows.append([np.nan if value is None else value for value in (*scores, *counts)])
    return np.array(rows, dtype=float)


def summarise(tables: Sequence[np.ndarray], seed: int) -> Row:
    """Fields of a row from the values ``[items, 6]`` of each task; tasks count alike, their items are drawn apart.

    Scores are 0 to 100; `dense_minus_score` is paired by item. Accept length is tokens over verifications.
    """
    draws = [Bootstrap([1] * len(table), seed + stratum) for stratum, table in enumerate(tables)]
    means = np.mean([draw.means(list(table[:, None])) for draw, table in zip(draws, tables)], axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        values = dict(
            score=means[:, _SCORE],
            dense_score=means[:, _DENSE],
            dense_minus_score=means[:, _DENSE] - means[:, _SCORE],
            accept_length=means[:, _TOKENS] / means[:, _VERIFICATIONS],
            dense_accept_length=means[:, _DENSE_TOKENS] / means[:, _DENSE_VERIFICATIONS],
        )
    known = {name: value if np.isfinite(value).all() else None for name, value in values.items()}
    fields: dict[str, Any] = dict(n=sum(map(len, tables)))
    fields |= {name: None if value is None else round(float(value[0]), 4) for name, value in known.items()}
    fields["new_tokens"] = round(float(means[0, _TOKENS]), 1)
    fields["ci"] = {name: None if value is None else draws[0].interval(value) for name, value in known.items()}
    return fields


def _drift(pairs: Sequence[tuple[Answer, Answer | None]], seed: int) -> Row:
    """How long answers change on the way, beside dense ones: how they repeat themselves and, of the judged ones, more.

    An answer counts as judged where the dense one of its item is judged too.
    """
    judged = [(answer, other) for answer, other in pairs if answer.agreement and (other is None or other.agreement)]
    fields: Row = _means_by_256(pairs, ("repeated",), seed)
    if judged:
        more = _means_by_256(judged, ("agreement", "logprob"), seed)
        fields = fields | more | dict(judged=len(judged), ci=fields["ci"] | more["ci"])
    return fields


def _means_by_256(pairs: Sequence[tuple[Answer, Answer | None]], names: Sequence[str], seed: int) -> Row:
    """Means of every 256 tokens, of whole answers and, where there are dense answers, by how much more of these."""
    shortest = min(len(_by_256(answer, names[0])) for answer, _ in pairs)
    own = {name: [_by_256(answer, name) for answer, _ in pairs] for name in names}
    fields: Row = {
        f"{name}_by_256": np.mean([values[:shortest] for values in own[name]], axis=0).round(4).tolist()
        for name in names
    }
    bootstrap, statistics = Bootstrap([1] * len(pairs), seed), {}
    for name in names:
        others = [np.nan if other is None else np.mean(_by_256(other, name)) for _, other in pairs]
        table = np.array([[np.mean(values) for values in own[name]], others])
        mean, dense = bootstrap.means([column[None] for column in table.T]).T
        statistics |= {name: mean, f"dense_minus_{name}": dense - mean}
    known = {name: value if np.isfinite(value).all() else None for name, value in statistics.items()}
    fields |= {name: None if value is None else round(float(value[0]), 4) for name, value in known.items()}
    return fields | dict(
        ci={name: None if value is None else bootstrap.interval(value) for name, value in known.items()}
    )


def _by_256(answer: Answer, name: str) -> list[float]:
    """Means of every 256 tokens of an answer."""
    if name != "repeated":
        values: list[float] = getattr(answer, name)
        return values
    again = repeats(answer.ids)
    return [float(np.mean(again[start : start + BUCKET])) for start in range(0, len(again), BUCKET)]


def repeats(ids: Sequence[int]) -> list[bool]:
    """Whether each token ends a run of `REPEATED` that the answer has had before."""
    seen: set[tuple[int, ...]] = set()
    again = []
    for end in range(1, len(ids) + 1):
        run = tuple(ids[max(0, end - REPEATED) : end])
        again.append(len(run) == REPEATED and run in seen)
        seen.add(run)
    return again


def _key(answers: Answers, name: str, run: int, task: str, context: int) -> Row:
    setting, settings = Setting.parse(name), answers.runs[run]["settings"]
    policy = POLICIES[setting.policy]
    return dict(
        model=Path(settings["target"]).name,
        draft=Path(settings["draft"]).name,
        task=task,
        context=context,
        k=setting.k,
        policy=setting.policy,
        groups=settings.get("layer_groups", 1) if policy.mixes else 1,
        profile=Path(settings["profile"]).stem if policy.uses_lookahead or policy.uses_history else None,
        rectify_interval=setting.interval,
        steps=settings["steps"],
        topk=settings["topk"],
    )


def render(rows: Sequence[Row]) -> str:
    """A table of each task and context: score, dense minus score with its interval, and accept length."""
    lines = []
    for task, context in dict.fromkeys((row["task"], row["context"]) for row in rows):
        lines.append(f"\n{task}, {context} tokens")
        lines.append(f"{'':<24}{'n':>5}{'score':>9}{'dense - score [95%]':>30}{'accept length':>15}")
        for row in rows:
            if (row["task"], row["context"]) == (task, context):
                lines.append(_line(row))
    return "\n".join(lines)


def _line(row: Row) -> str:
    name = str(Setting(row["policy"], row["k"], row["rectify_interval"]))
    score, less, accept = (
        "" if row[field] is None else f"{row[field]:.2f}" for field in ("score", "dense_minus_score", "accept_length")
    )
    low_high = row["ci"]["dense_minus_score"]
    less += "" if low_high is None else f" [{low_high[0]:.2f}, {low_high[1]:.2f}]"
    drift = "".join(f"  {name} {row[name]}" for name in ("agreement", "repeated_by_256") if name in row)
    return f"{name:<24}{row['n']:>5}{score:>9}{less:>30}{accept:>15}{drift}"
