"""Quality of sparse verification against dense, on teacher-forced windows of long texts.

    python3 benchmark/quality.py --prose NOVEL.txt... --code FILE.py... --json benchmark/results/quality.json
    python3 benchmark/quality.py --target Qwen2.5-Coder-1.5B --draft Qwen2.5-Coder-0.5B --device cuda --minutes 9 ...

A window verifies a text's own tokens, as if every draft were right, once over the whole context and once over each
list. Both models run in transformers; scores and lists come from the product's own code. All methods of a passage share
one prefill a model. A row is a task, a context, a budget and a method:

    task, context, k, policy, groups, profile, lookahead_share, extra_step   what was measured (quality_texts, _methods)
    n, passages                                                  windows, and the passages that they come from
    kl, agreement, mass                                          quality_windows.measure
    kl_over_oracle, kl_minus_default, perplexity...              quality_statistics.summarise; the default is that of a
                                                                 launch with the first --profile
    ci                                                           95% intervals by bootstrap, clustered by passage
    score, dense_score, accept_length                            null: they need generated answers

A task and context that --minutes cuts short has rows of fewer windows, which --resume measures again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from quality_methods import CHOICES, ORACLE, Method, make_methods, make_profiles, possible_groups
from quality_statistics import Bootstrap, summarise
from quality_texts import TASKS, make_passage
from quality_windows import Reading, measure
from results import Deadline, Results, Row, add_run_options, describe_run

from dustin_sglang.calibrate.checks import check_context
from dustin_sglang.calibrate.mass import ListSize
from dustin_sglang.calibrate.pair import add_device_options, load_pair
from dustin_sglang.calibrate.settings import Settings
from dustin_sglang.calibrate.texts import Texts
from dustin_sglang.calibrate.trace import CalibrationError, TracedModel
from dustin_sglang.config import EXTRA_STEP_MODES, DustinConfig
from dustin_sglang.profile import Profile, ProfileError
from dustin_sglang.selection.policies import POLICIES

KEY = (
    "model",
    "draft",
    "task",
    "context",
    "k",
    "policy",
    "groups",
    "profile",
    "lookahead_share",
    "extra_step",
    "rows",
    "dtype",
    "seed",
)
Values = dict[tuple[Method, int], list[np.ndarray]]  # by method and k: [windows, COLUMNS] of each passage


class Quality:
    """Measures tasks with one pair of models.

    Parameters
    ----------
    target, draft
        The models.
    tokenizer
        The target's, of transformers.
    profiles
        By name; the first is that of the default method.
    args
        The command line.
    """

    def __init__(
        self,
        target: TracedModel,
        draft: TracedModel,
        tokenizer: Any,
        profiles: dict[str, Profile],
        args: argparse.Namespace,
    ) -> None:
        self._target, self._draft, self._tokenizer, self._profiles, self._args = (
            target,
            draft,
            tokenizer,
            profiles,
            args,
        )
        extra_steps = [mode == "auto" for mode in args.extra_step]
        layers = target.shape.layers
        self._methods = make_methods(args.policies, profiles, args.shares, layers, args.groups, extra_steps)
        name, first = next(iter(profiles.items()))
        count = first.layer_groups if first.layer_groups in args.groups else 1
        self._default = make_methods([DustinConfig().policy], {name: first}, [], layers, [count])[-1]

    def run(self, results: Results, start: float) -> None:
        """Add the rows that `results` does not have; the time left is shared evenly by the tasks and contexts left.

        Parameters
        ----------
        start
            From when --minutes count, as `time.monotonic` gives it.
        """
        minutes = self._args.minutes
        places = [(task, context) for context in self._args.contexts for task in self._args.tasks]
        pending = [(task, context) for task, context in places if not self._is_done(task, context, results)]
        for count, (task, context) in enumerate(pending):
            left = None if minutes is None else minutes - (time.monotonic() - start) / 60
            share = None if left is None else left / (len(pending) - count)
            values, sizes = self._measure(task, context, Deadline(share))
            for row in self._rows(task, context, values, sizes) if sizes else ():
                results.add(row)

    def _is_done(self, task: str, context: int, results: Results) -> bool:
        keys = [self._key(task, context, method, k) for method in self._methods for k in self._args.ks]
        rows = [results.find(**key) for key in keys]
        return all(row is not None and row["n"] >= self._args.windows for row in rows)

    def _measure(self, task: str, context: int, deadline: Deadline) -> tuple[Values, list[int]]:
        """Values of every method and budget, and the windows of each passage."""
        from tqdm import tqdm

        args = self._args
        texts = Texts(args.code if task == "code" else args.prose, self._tokenizer, context, args.rows, args.seed)
        values: Values = {(method, k): [] for method in self._methods for k in args.ks}
        sizes: list[int] = []
        with tqdm(total=args.windows, desc=f"{task} {context}", unit="window") as bar:
            while sum(sizes) < args.windows and not deadline.passed:
                passage = make_passage(task, texts, len(sizes), context, args.rows, args.seed)
                reading = Reading(self._target, self._draft, passage, args.rows, self._profiles, args.groups)
                for k in args.ks:
                    measured = measure(reading, self._methods, ListSize(k, args.sinks, args.window))
                    for method, table in measured.items():
                        values[method, k].append(table.numpy())
                sizes.append(len(passage.places))
                bar.update(sizes[-1])
        return values, sizes

    def _rows(self, task: str, context: int, values: Values, sizes: list[int]) -> Iterator[Row]:
        bootstrap = Bootstrap(sizes, self._args.seed)
        for k in self._args.ks:
            means = {method: bootstrap.means(values[method, k]) for method in self._methods}
            for method, mean in means.items():
                fields = summarise(mean, means[Method(ORACLE)], means.get(self._default), bootstrap)
                missing = dict(score=None, dense_score=None, accept_length=None)
                yield self._key(task, context, method, k) | dict(n=sum(sizes), passages=len(sizes)) | fields | missing

    def _key(self, task: str, context: int, method: Method, k: int) -> Row:
        args = self._args
        return dict(
            model=args.target.name,
            draft=args.draft.name,
            task=task,
            context=context,
            k=k,
            policy=method.policy,
            groups=method.groups,
            profile=method.profile,
            lookahead_share=method.share,
            extra_step=method.extra_step,
            rows=args.rows,
            dtype=args.dtype,
            seed=args.seed,
        )


def name_of(row: Row) -> str:
    """What a table calls a row's method."""
    name = f"{row['policy']}, {row['groups']} lists" if row["groups"] > 1 else row["policy"]
    share = "" if row["lookahead_share"] is None else f" {row['lookahead_share']:g}"
    looks_ahead = row["policy"] != ORACLE and POLICIES[row["policy"]].uses_lookahead
    fewer = ", no extra step" if looks_ahead and not row.get("extra_step") else ""  # as in runs from before the flag
    return name + share + fewer + ("" if row["profile"] is None else f" ({row['profile']})")


def render(rows: Sequence[Row]) -> str:
    """A table of each task and context: KL with its interval, agreement and captured mass by method and k."""
    lines = []
    for task, context in dict.fromkeys((row["task"], row["context"]) for row in rows):
        here = [row for row in rows if (row["task"], row["context"]) == (task, context)]
        ks = sorted({row["k"] for row in here})
        lines.append(f"\n{task}, {context} tokens, n = {here[0]['n']}: KL [95%] / agreement / captured mass")
        lines.append(f"{'':<44}" + "".join(f"{f'k = {k}':^42}" for k in ks))
        for name in dict.fromkeys(map(name_of, here)):
            by_k = {row["k"]: row for row in here if name_of(row) == name}
            lines.append(f"{name:<44}" + "".join(f"{_cell(by_k[k]) if k in by_k else '':^42}" for k in ks))
    return "\n".join(lines)


def _cell(row: Row) -> str:
    low_high = row["ci"]["kl"]
    interval = "" if low_high is None else f" [{low_high[0]:.4f}, {low_high[1]:.4f}]"
    return f"{row['kl']:.4f}{interval} / {row['agreement']:.3f} / {row['mass']:.2f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", type=Path, default=Path(".models/smollm2"), help="folder (default: %(default)s)")
    add("--draft", type=Path, default=Path(".models/smollm2-draft26"), help="folder (default: %(default)s)")
    add("--prose", type=Path, nargs="+", default=[], metavar="FILE", help="long texts of all tasks but code, UTF-8")
    add("--code", type=Path, nargs="+", default=[], metavar="FILE", help="long source files of the task code")
    add("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    add("--contexts", nargs="+", type=int, default=[4096], metavar="N", help="tokens of a passage's last window")
    add("--ks", nargs="+", type=int, default=[128, 256, 512, 1024], metavar="K", help="budgets")
    add("--policies", nargs="+", choices=CHOICES, help="the one-list oracle is always measured; oracle adds those with "
        "a list per group and per layer (default: all that --groups allow)")  # fmt: skip
    add("--groups", nargs="+", type=int, default=[1], metavar="G", help="groups of layers with a list each, for "
        "policies that can have them (default: %(default)s)")  # fmt: skip
    add("--profile", nargs="+", default=["auto"], help="auto (as at a launch), automatic, all-heads, random-heads, "
        "or files")  # fmt: skip
    add("--shares", nargs="+", type=float, default=[], help="lookahead shares of hybrid and hybrid-sum beside each "
        "profile's own")  # fmt: skip
    add("--extra-step", nargs="+", choices=EXTRA_STEP_MODES, default=["auto"], help="with and without the draft step "
        "for the last token (default: auto, with it)")  # fmt: skip
    add("--windows", type=int, default=200, metavar="N", help="least number of windows of a task and context")
    add("--rows", type=int, default=5, help="verified rows (default: %(default)s)")
    add("--sinks", type=int, default=4)
    add("--window", type=int, default=64)
    add("--seed", type=int, default=0, help="of passages, random heads and resampling")
    add_device_options(parser)
    add_run_options(parser, minutes="share this time among tasks and contexts; a passage that began is ended")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Refuse bad values with a message that names the flag."""
    needed = {"--code" if task == "code" else "--prose" for task in args.tasks}
    if absent := [flag for flag in sorted(needed) if not getattr(args, flag[2:])]:
        raise ValueError(f"{' and '.join(absent)}: no file, but --tasks {' '.join(args.tasks)} need some")
    protected = args.sinks + args.window
    if min(args.ks) <= protected:
        raise ValueError(f"--ks {min(args.ks)}: must be above --sinks plus --window, {protected}")
    chosen = args.policies or CHOICES
    args.policies = [name for name in chosen if name == ORACLE or possible_groups(name, args.groups)]
    if min(args.groups) < 1:
        raise ValueError(f"--groups {min(args.groups)}: must be at least 1")
    if len(args.policies) < len(chosen) and chosen is not CHOICES:
        raise ValueError(f"--policies {' '.join(chosen)}: hybrid-depth needs an even number among --groups")
    if any(not 0 <= share <= 1 for share in args.shares):
        raise ValueError(f"--shares {args.shares}: must be in 0..1")
    if args.rows < 2 or args.windows < 1 or min(args.contexts) < 256:
        raise ValueError("--rows must be at least 2, --windows at least 1, --contexts at least 256")


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = _parser().parse_args(argv)
    try:
        _check(args)
        _run(args)
    except (CalibrationError, ProfileError, ValueError) as error:
        print(f"quality: {error}", file=sys.stderr)
        return 1
    return 0


def _run(args: argparse.Namespace) -> None:
    from transformers import AutoTokenizer

    start = time.monotonic()
    target, draft = load_pair(args)
    if max(args.groups) > target.shape.layers:
        raise ValueError(f"--groups {max(args.groups)}: the target has {target.shape.layers} layers")
    check_context(target, draft, Settings(context=max(args.contexts), rows=args.rows))
    shapes, paths = dict(draft=draft.shape, target=target.shape), dict(draft=args.draft, target=args.target)
    profiles = make_profiles(args.profile, shapes, paths, args.seed)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    settings |= {name: [file.name for file in getattr(args, name)] for name in ("prose", "code")}
    results = Results(args.json, KEY, settings, describe_run(), resume=args.resume, any_commit=args.any_commit)
    quality = Quality(target, draft, AutoTokenizer.from_pretrained(args.target), profiles, args)
    quality.run(results, start)
    print(render([row for row in results.rows if "kl" in row]))  # the file has generated answers too


if __name__ == "__main__":
    sys.exit(main())
