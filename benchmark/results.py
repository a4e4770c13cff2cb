"""Result files: a list of runs, each with its environment, its settings and rows that are written as they come."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
UNKNOWN = "unknown"
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "sglang", "flashinfer-python", "triton")


def describe_run() -> Row:
    """Machine, versions, command, commit and date of this run.

    The commit is `DUSTIN_COMMIT` where that is set: a copy of the checkout may have no history.
    """
    return dict(
        machine=torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu",
        versions=_versions(),
        command=" ".join(["python3", *sys.argv]),
        commit=os.environ.get("DUSTIN_COMMIT") or _commit(),
        date=time.strftime("%Y-%m-%d"),
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    head = _git("rev-parse", "HEAD")
    changed = head and _git("status", "--porcelain", "--", "python", "kernels", "benchmark", ":!benchmark/results")
    return f"{head} with changes" if changed else head or UNKNOWN


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def add_run_options(
    parser: argparse.ArgumentParser, minutes: str = "stop before the row that would start later"
) -> None:
    """Add ``--minutes``, ``--json``, ``--resume`` and ``--any-commit``."""
    parser.add_argument("--json", type=Path, help="result file; a run is added to those that it holds")
    add_resume_options(parser, minutes)


def add_resume_options(parser: argparse.ArgumentParser, minutes: str) -> None:
    """Add ``--minutes``, ``--resume`` and ``--any-commit``."""
    parser.add_argument("--minutes", type=float, help=minutes)
    parser.add_argument("--resume", action="store_true", help="skip what the file has of this commit and machine")
    parser.add_argument("--any-commit", action="store_true", help="with --resume: or of any other commit")


def read_runs(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a result file, oldest first; none where there is no file."""
    return json.loads(path.read_text())["runs"] if path.exists() else []


def latest_rows(runs: Sequence[dict[str, Any]], key: Sequence[str]) -> list[Row]:
    """Return all rows of all runs, of those with equal `key` fields only the newest; the newest row comes last."""
    rows: dict[tuple[Any, ...], Row] = {}
    for row in (row for run in runs for row in run["rows"]):
        rows.pop(_key_of(row, key), None)
        rows[_key_of(row, key)] = row
    return list(rows.values())


def _key_of(row: Row, key: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row.get(field) for field in key)


class Results:
    """One run that adds its rows to a result file.

    Parameters
    ----------
    path
        The file; None keeps the rows in memory alone.
    key
        Fields that name a row.
    settings
        What to record of the command line.
    run
        Environment of the run (`describe_run`).
    resume
        Rows measured before, at this commit on this machine, count as done.
    any_commit
        So do rows of other commits.
    """

    def __init__(
        self,
        path: Path | None,
        key: Sequence[str],
        settings: Row,
        run: Row,
        *,
        resume: bool = False,
        any_commit: bool = False,
    ) -> None:
        self._path, self._key = path, key
        earlier = read_runs(path) if path else []
        counting = [old for old in earlier if resume and same_run(old["run"], run, any_commit)]
        self._rows = {_key_of(row, key): row for old in counting for row in old["rows"]}
        self._earlier = [format_run(old["run"], old["settings"], map(json.dumps, old["rows"])) for old in earlier]
        self._run, self._settings, self._lines = run, settings, list[str]()

    @property
    def rows(self) -> list[Row]:
        """Rows of this run and of the earlier runs that count, the newest of each key."""
        return list(self._rows.values())

    def find(self, **fields: Any) -> Row | None:
        """Return the row whose key fields are `fields` (None where one is not named), if there is one."""
        return self._rows.get(_key_of(fields, self._key))

    def add(self, row: Row) -> None:
        """Add a row and write the file: it is whole at every moment."""
        self._rows[_key_of(row, self._key)] = row
        self._lines.append(json.dumps(row))
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(format_file([*self._earlier, format_run(self._run, self._settings, self._lines)]))
        part.replace(self._path)


def format_run(run: Row, settings: Row, rows: Iterable[str]) -> str:
    """Return a run as JSON text, a line a row."""
    lines = ",\n".join(f"   {row}" for row in rows)
    return f' {{"run": {json.dumps(run)},\n  "settings": {json.dumps(settings)},\n  "rows": [\n{lines}\n  ]}}'


def format_file(runs: Iterable[str]) -> str:
    """Return a result file of runs as `format_run` writes them."""
    return '{"runs": [\n' + ",\n".join(runs) + "\n]}\n"


def same_run(old: Row, new: Row, any_commit: bool) -> bool:
    """Whether what an old run measured counts as measured for a new one (`describe_run`)."""
    commits = any_commit or (old["commit"] == new["commit"] != UNKNOWN)
    return commits and old["machine"] == new["machine"]


class Deadline:
    """A time limit that lets the row in progress end.

    Parameters
    ----------
    minutes
        From now on; None never passes.
    """

    def __init__(self, minutes: float | None) -> None:
        self._end = None if minutes is None else time.monotonic() + 60 * minutes

    @property
    def passed(self) -> bool:
        """Whether no further row should start."""
        return self._end is not None and time.monotonic() > self._end


def progress(items: Sequence[Any], deadline: Deadline, unit: str) -> Iterator[Any]:
    """Yield items behind a progress bar until the deadline passes; say then how many are left."""
    from tqdm import tqdm

    with tqdm(total=len(items), unit=unit, mininterval=2) as bar:
        for count, item in enumerate(items):
            if deadline.passed:
                tqdm.write(f"time is up: {len(items) - count} of {len(items)} {unit}s left; go on with --resume")
                return
            yield item
            bar.update()
