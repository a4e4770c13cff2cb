"""Quality of generated answers under each policy beside dense: RULER, LongBench, and long answers that may drift.

    python3 benchmark/generation.py items items.jsonl.xz --tokenizer TARGET --ruler --contexts 4096 8192 16384 30000
    python3 benchmark/generation.py items more.jsonl.xz --tokenizer TARGET --longbench DATA --longbench-config CONFIG
    python3 benchmark/generation.py answer items.jsonl.xz answers.jsonl --target TARGET --draft DRAFT
    python3 benchmark/generation.py judge items.jsonl.xz answers.jsonl --target TARGET
    python3 benchmark/generation.py score items.jsonl.xz answers.jsonl --json benchmark/results/quality.json

`items` makes the prompts once, on any machine. `answer` starts an engine for each POLICY[:K[:INTERVAL]] of --settings
and lets it answer them, greedily but for --continue; it needs SGLang and this repository alone, and runs without a GPU
under `python -m dustin_sglang.cpu`. `judge` has the dense target read long answers (those that ignore the end of
sequence), in transformers and float32 on any machine, and adds to the file what it would have chosen. `score` needs no
model. A row is a task, a context and a setting:

    task, context, k, policy, groups, profile, rectify_interval, steps, topk   what was measured
    n                                          items that the setting and dense have both answered
    score, dense_score, dense_minus_score      0 to 100, by the benchmark's own metric; null for long answers
    accept_length, dense_accept_length         tokens a verification
    new_tokens                                 mean length of an answer
    agreement, logprob                         of the `judged` ones: the share of tokens that the dense target takes
                                               there, and its mean log-probability of them
    repeated                                   of all long answers: the share of tokens that end 16 which the answer has
                                               had before
    dense_minus_agreement, ..._logprob, ..._repeated   by how much more of dense answers
    agreement_by_256, logprob_by_256, repeated_by_256  the first three of every 256 tokens
    ci                                         95% intervals by bootstrap, paired by item

The task `ruler` is the mean of RULER's tasks of a context.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import generation_longbench
import generation_ruler
from generation_answers import Answers, Setting
from generation_continue import make_items as make_long_items
from generation_engines import answer_all
from generation_items import Item, chat_overhead, choose_items, read_items, write_items
from generation_judge import judge_all
from generation_metrics import check_metrics
from generation_rows import KEY, make_rows, render
from real_engine import add_pair_options
from results import Results, add_resume_options, describe_run

from dustin_sglang.calibrate.trace import CalibrationError
from dustin_sglang.profile import default_groups

SETTINGS = ("dense", "hybrid-sum:512", "hybrid:512", "lookahead:512", "quest:512", "streaming:512", "hybrid-sum:128",
            "hybrid-sum:256", "hybrid-sum:1024")  # fmt: skip


def make_items(args: argparse.Namespace, tokenizer: Any) -> list[Item]:
    """Items of all benchmarks that the command line names.

    Raises
    ------
    ValueError, CalibrationError
        Something is absent; the message names the flag.
    """
    from tqdm import tqdm

    items: list[Item] = []
    overhead = chat_overhead(tokenizer)
    places = [(task, context) for context in args.contexts for task in args.ruler or ()]
    for task, context in tqdm(places, unit="task", disable=not places):
        items += generation_ruler.make_items(task, context, args.count, args.tokenizer, overhead, args.seed)
    if args.longbench:
        data = generation_longbench.find_data(args.longbench)
        for context in args.contexts:
            for dataset in args.datasets:
                arguments = (args.longbench_config, dataset, context, args.count, tokenizer)
                items += generation_longbench.make_items(data, *arguments)
    for context in args.contexts if args.excerpts else ():
        items += make_long_items(args.excerpts, context, args.count, args.new_tokens, tokenizer, args.seed)
    return items


def run_items(args: argparse.Namespace) -> None:
    """Make items and write them."""
    from transformers import AutoTokenizer

    if not (args.ruler or args.longbench or args.excerpts):
        raise ValueError("nothing to make: give --ruler, --longbench or --continue")
    if args.longbench and not args.longbench_config:
        raise ValueError("--longbench needs --longbench-config, the folder LongBench/config of its repository")
    items = make_items(args, AutoTokenizer.from_pretrained(args.tokenizer))
    write_items(args.items, items)
    print(f"{args.items}: {len(items)} items")


def run_answer(args: argparse.Namespace) -> None:
    """Let engines answer."""
    from transformers import AutoTokenizer

    settings = [Setting.parse(text) for text in args.settings]
    items = choose_items(read_items(args.items), args.tasks, args.contexts, args.limit)
    check_metrics(items)
    answers, run = Answers(args.answers), describe_run()
    options = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    options["layer_groups"] = default_groups(args.profile, dict(draft=str(args.draft), target=str(args.target)))
    answers.begin(run, {name: value for name, value in options.items() if name != "function"})
    answer_all(items, settings, answers, run, AutoTokenizer.from_pretrained(args.target), args)


def run_judge(args: argparse.Namespace) -> None:
    """Let the dense target read the long answers."""
    from transformers import AutoTokenizer

    if not args.answers.exists():
        raise ValueError(f"{args.answers}: no such file; `answer` makes it")
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    count = judge_all(read_items(args.items), Answers(args.answers), tokenizer, args.target, args.minutes)
    print(f"{args.answers}: {count} answers judged")


def run_score(args: argparse.Namespace) -> None:
    """Write the rows of all answers, each to the run that gave them, and print a table."""
    items, answers = read_items(args.items), Answers(args.answers)
    check_metrics(items)
    rows = list(make_rows(items, answers, args.seed))
    for number, entry in enumerate(answers.runs):
        new = [row for of, row in rows if of == number]
        results = Results(args.json, KEY, entry["settings"], entry["run"], resume=True)
        for row in new:
            if results.find(**{name: row[name] for name in KEY}) != row:
                results.add(row)
    print(render([row for _, row in rows]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(required=True, metavar="items|answer|judge|score")

    step = steps.add_parser("items", help="make prompts")
    step.set_defaults(function=run_items)
    add = step.add_argument
    add("items", type=Path, help="file to write; compressed if it ends in .xz")
    add("--tokenizer", type=Path, required=True, help="folder of the target or of its tokenizer alone")
    add("--contexts", nargs="+", type=int, default=[4096, 8192, 16384, 30000], metavar="N")
    add("--count", type=int, default=100, help="items of a task and context (default: %(default)s)")
    add("--seed", type=int, default=42, help="default: %(default)s, that of RULER's own runs")
    ruler = generation_ruler.TASKS
    add("--ruler", nargs="*", choices=ruler, metavar="TASK", help=f"RULER's tasks; none named: {' '.join(ruler)}")
    add("--longbench", metavar="PATH", help="folder of JSONL files, data.zip, or hub")
    add("--longbench-config", type=Path, metavar="DIR", help="folder of dataset2prompt.json and dataset2maxlen.json")
    add("--datasets", nargs="+", default=list(generation_longbench.METRIC), help="of LongBench; _e for LongBench-E")
    add("--continue", dest="excerpts", nargs="+", type=Path, metavar="FILE", help="long texts to go on with, UTF-8")
    add("--new-tokens", type=int, default=2048, help="of what they go on with (default: %(default)s)")

    step = steps.add_parser("answer", help="let engines answer")
    step.set_defaults(function=run_answer)
    add = step.add_argument
    add("items", type=Path)
    add("answers", type=Path, help="file to which answers are added")
    add_pair_options(step)
    add("--settings", nargs="+", default=list(SETTINGS), metavar="POLICY[:K[:INTERVAL]]", help="k is 512 unless given, "
        f"INTERVAL that of --dustin-rectify-interval; default: {' '.join(SETTINGS)}")  # fmt: skip
    add("--profile", default="auto", help="auto, or a file, as --dustin-profile")
    add("--tasks", nargs="+", help="default: all of the items")
    add("--contexts", nargs="+", type=int, metavar="N", help="the same")
    add("--limit", type=int, help="take only the first items of each task and context")
    add("--running", type=int, default=32, help="requests at a time (default: %(default)s)")
    add_resume_options(step, "start no batch later than this")

    step = steps.add_parser("judge", help="let the dense target read long answers")
    step.set_defaults(function=run_judge)
    add = step.add_argument
    add("items", type=Path)
    add("answers", type=Path)
    add("--target", type=Path, required=True, help="folder of the model that answered")
    add("--minutes", type=float, help="start no item later than this; judged answers are not judged again")

    step = steps.add_parser("score", help="turn answers into rows")
    step.set_defaults(function=run_score)
    add = step.add_argument
    add("items", type=Path)
    add("answers", type=Path)
    add("--json", type=Path, help="result file; runs are added to those that it holds")
    add("--seed", type=int, default=0, help="of resampling")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    args = _parser().parse_args(argv)
    if getattr(args, "ruler", None) == []:
        args.ruler = list(generation_ruler.TASKS)
    try:
        args.function(args)
    except (CalibrationError, ValueError) as error:
        print(f"generation: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
