"""Answers of engines: what was set, what came out, and the file that collects them over runs, a JSON line each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from results import Row, same_run

from dustin_sglang.config import ConfigError, DustinConfig, variable
from dustin_sglang.selection.policies import POLICIES

DENSE = "dense"
BUCKET = 256  # tokens of a long answer that are judged together


@dataclass(frozen=True)
class Setting:
    """How an engine verifies.

    Attributes
    ----------
    policy
        One of `POLICIES`.
    k
        Budget; None for dense.
    interval
        Committed tokens between rectifications; 0: never.
    """

    policy: str
    k: int | None = None
    interval: int = 0

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Setting of ``POLICY[:K[:INTERVAL]]``; k is 512 unless given.

        Raises
        ------
        ValueError
            Not of this form, or out of range.
        """
        policy, *numbers = text.split(":")
        try:
            k, interval, *more = [*map(int, numbers), *(512, 0)[len(numbers) :]]
            if more:
                raise ValueError("too many numbers")
            DustinConfig(policy=policy, budget=k, rectify_interval=interval)
        except (ConfigError, ValueError) as error:
            raise ValueError(f"--settings {text}: {error}; the form is POLICY[:K[:INTERVAL]]") from error
        dense = POLICIES[policy].dense
        if dense and numbers:
            raise ValueError(f"--settings {text}: dense verification has neither budget nor rectification")
        return cls(policy, None if dense else k, interval)

    def environment(self, profile: str) -> dict[str, str]:
        """Variables of an engine that verifies so."""
        values = dict(policy=self.policy, budget=self.k or 512, rectify_interval=self.interval, profile=profile)
        return {variable(name): str(value) for name, value in values.items()}

    def __str__(self) -> str:
        return self.policy if self.k is None else f"{self.policy}:{self.k}:{self.interval}"


@dataclass(frozen=True)
class Answer:
    """What an engine made of an item.

    Attributes
    ----------
    item
        Its id.
    setting
        As `Setting.parse` reads it.
    text
        Of the answer.
    ids
        Its tokens.
    verifications
        That gave them; the first token is the prefill's.
    agreement, logprob
        Once judged: means over every `BUCKET` tokens of what `dense_judge.judge` returns.
    """

    item: str
    setting: str
    text: str
    ids: list[int]
    verifications: int
    agreement: list[float] | None = None
    logprob: list[float] | None = None


class Answers:
    """A file of runs, each a line ``{"run": ..., "settings": ...}`` and a line an answer.

    Parameters
    ----------
    path
        Read if it exists; `begin` and `add` append to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.runs: list[dict[str, Any]] = []
        self._found: dict[tuple[str, str], tuple[int, Answer]] = {}
        if path.exists():
            with open(path, encoding="utf-8") as file:
                for line in file:
                    self._take(json.loads(line))

    def _take(self, line: dict[str, Any]) -> None:
        if "run" in line:
            self.runs.append(line)
        else:
            answer = Answer(**line)
            self._found.pop((answer.setting, answer.item), None)
            self._found[answer.setting, answer.item] = (len(self.runs) - 1, answer)

    def begin(self, run: Row, settings: Row) -> None:
        """Begin a run.

        Raises
        ------
        ValueError
            The file has answers of other models.
        """
        for name in ("target", "draft", "steps", "topk", "profile"):
            if self.runs and self.runs[0]["settings"][name] != settings[name]:
                old = self.runs[0]["settings"][name]
                raise ValueError(f"--answers {self._path}: has answers of --{name} {old}; name another file")
        self._append(dict(run=run, settings=settings))

    def add(self, answers: Sequence[Answer]) -> None:
        """Append answers to the last run that was begun."""
        for answer in answers:
            self._append(_line(answer))

    def replace(self, answer: Answer) -> None:
        """Put what became of an answer in its place, for `rewrite`."""
        key = (answer.setting, answer.item)
        self._found[key] = (self._found[key][0], answer)

    def rewrite(self) -> None:
        """Write the file anew, without answers that newer ones have replaced; it is whole at every moment."""
        lines: list[dict[str, Any]] = []
        for number, run in enumerate(self.runs):
            lines += [run, *(_line(answer) for of, answer in self._found.values() if of == number)]
        part = self._path.with_name(self._path.name + ".part")
        part.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
        part.replace(self._path)

    def _append(self, line: dict[str, Any]) -> None:
        self._take(line)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def done(self, setting: Setting, run: Row, any_commit: bool) -> set[str]:
        """Ids of the items that this machine answered under a setting, at this commit or at any."""
        found = ((number, answer) for number, answer in self._found.values() if answer.setting == str(setting))
        return {answer.item for number, answer in found if same_run(self.runs[number]["run"], run, any_commit)}

    def settings(self) -> list[str]:
        """Settings that have answers, dense first."""
        found = dict.fromkeys(setting for setting, _ in self._found)
        return sorted(found, key=lambda setting: setting != DENSE)

    def of(self, setting: str) -> dict[str, tuple[int, Answer]]:
        """By item, the newest answer under a setting and the number of its run."""
        return {item: found for (name, item), found in self._found.items() if name == setting}


def _line(answer: Answer) -> dict[str, Any]:
    return {name: value for name, value in asdict(answer).items() if value is not None}
