"""Decode throughput of whole engines: no speculation, STANDALONE, dustin, and dustin with a sparse draft.

    python3 benchmark/end_to_end.py --contexts 8000 32000 --batches 1 8 --json benchmark/results/end_to_end.json

Each engine starts once, for the largest sizes. With shapes, weights are dummies and acceptance is forced
(SGLANG_SIMULATE_ACC_LEN), so the rows say how fast a step is and nothing about quality; with folders, models and
acceptance are real and the prompts come from --text. Prompts are prefilled once into the radix cache: every size is a
part of the largest. Throughput is the difference of two generations of different lengths over these, so that neither
prefill nor start-up is in it. Commands that share a --gate may start together: their engines measure in turn.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_options import (
    ENGINE_KEY,
    NO_SPECULATION,
    STANDALONE,
    Models,
    add_engine_options,
    alone,
    find_models,
    options,
    row_key,
    set_environment,
)
from results import ROOT, Deadline, Results, Row, add_run_options, describe_run, progress
from shapes import SHAPES
from tqdm import tqdm
from trace_summary import summarise_trace

KEY = (*ENGINE_KEY, "accept", "batch", "context")
# One token comes with the prefill; the rest is a multiple of 12, so that 3 and 4 tokens a verification end with them.
SHORT, LONG = 1 + 36, 1 + 156
ROOM = 1024  # tokens of a context beside the prompt
DEMO_TEXT = ROOT / "python" / "dustin_sglang" / "demo" / "document.txt"


@dataclass(frozen=True)
class Generation:
    """One batch of answers.

    Attributes
    ----------
    seconds
        Until the last one was there.
    accept_length
        Tokens a verification, as SGLang counts; 1 without speculation.
    """

    seconds: float
    accept_length: float


class RunningEngine:
    """An engine and the prompts of its largest size.

    Parameters
    ----------
    method
        One of ENGINES.
    models
        What it runs.
    args
        The command line.
    """

    def __init__(self, method: str, models: Models, args: argparse.Namespace) -> None:
        import sglang as sgl

        set_environment(method, models, args)
        batch, context = max(args.batches), max(args.contexts)
        self.method = method
        self.forced_accept_length = args.accept_length if models.dummy else None
        self._prompts = make_prompts(models, args.text, batch, context)
        self._engine = sgl.Engine(
            **options(method, models, args, batch, context + ROOM),
            max_total_tokens=batch * (context + ROOM),
            skip_tokenizer_init=True,
            grammar_backend="none",
        )
        self.room: int = self._engine.get_server_info()["max_total_num_tokens"]

    def generate(self, batch: int, context: int, new_tokens: int) -> Generation:
        """Answer the first `context` tokens of the first `batch` prompts."""
        sampling = dict(temperature=0, max_new_tokens=new_tokens, ignore_eos=True)
        start = time.perf_counter()
        answers = self._engine.generate(
            input_ids=[prompt[:context] for prompt in self._prompts[:batch]], sampling_params=sampling
        )
        seconds = time.perf_counter() - start
        return Generation(seconds, statistics.mean(a["meta_info"].get("spec_accept_length", 1.0) for a in answers))

    def trace(self, batch: int, context: int) -> Row:
        """Profile some decode steps."""
        with tempfile.TemporaryDirectory() as folder:
            self._engine.start_profile(output_dir=folder, activities=["CPU", "GPU"])
            self.generate(batch, context, SHORT)
            self._engine.stop_profile()
            return summarise_trace(_finished_trace(Path(folder)))

    def shutdown(self) -> None:
        """End its processes."""
        self._engine.shutdown()


def _finished_trace(folder: Path, seconds: int = 60) -> Path:
    """Return the profile that appears in `folder`, once it no longer grows."""
    sizes: list[int] = []
    for _ in range(seconds):
        traces = sorted(folder.rglob("*.trace.json.gz"))
        sizes.append(traces[-1].stat().st_size if traces else 0)
        if sizes[-1] and sizes[-1:] * 2 == sizes[-2:]:
            return traces[-1]
        time.sleep(1)
    raise RuntimeError(f"no profile was written to {folder} within {seconds} s")


def make_prompts(models: Models, text: Path, batch: int, context: int) -> list[list[int]]:
    """Return `batch` different prompts of `context` tokens: random ones for dummies, a text's for real models."""
    if models.dummy:
        draw = random.Random(0)
        return [[draw.randrange(10, 100000) for _ in range(context)] for _ in range(batch)]
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(models.target)(text.read_text())["input_ids"]
    tokens *= 2 + context // len(tokens)
    step = max(1, (len(tokens) - context) // batch)  # each begins elsewhere, so none is another's prefix
    return [tokens[i * step : i * step + context] for i in range(batch)]


def measure(engine: RunningEngine, batch: int, context: int, args: argparse.Namespace) -> Row:
    """Return what a row holds beside its key."""
    needed = batch * (context + LONG + 2 * args.steps)
    if needed > engine.room:
        return dict(skipped=f"needs {needed} KV slots; there are {engine.room}")
    engine.generate(batch, context, 1)
    engine.generate(batch, context, SHORT)
    rates, accepted = [], []
    for _ in range(args.repeats):
        long, short = (engine.generate(batch, context, tokens) for tokens in (LONG, SHORT))
        rates.append(batch * (LONG - SHORT) / (long.seconds - short.seconds))
        accepted.append(long.accept_length)
    rate = statistics.median(rates)
    accept_length = engine.forced_accept_length or statistics.mean(accepted)
    if engine.method == NO_SPECULATION:
        accept_length = 1.0
    row = dict(
        tok_s=round(rate, 1),
        spread=[round(min(rates), 1), round(max(rates), 1)],
        step_ms=round(1000 * batch * accept_length / rate, 2),
        accept_length=round(accept_length, 3),
    )
    return row | (dict(step=engine.trace(batch, context)) if args.trace else {})


def with_ratios(row: Row, results: Results) -> Row:
    """Add the row's throughput over that of no speculation and of STANDALONE at the same size."""
    ratios = {}
    for name, method in (("ratio", NO_SPECULATION), ("ratio_standalone", STANDALONE)):
        same = ("shape", "tp", "accept", "batch", "context")
        base = [
            other
            for other in [*results.rows, row]
            if other["method"] == method and all(other[field] == row[field] for field in same) and "tok_s" in other
        ]
        if base and "tok_s" in row:
            ratios[name] = round(row["tok_s"] / base[-1]["tok_s"], 2)
    return row | ratios


def describe(row: Row) -> str:
    """One line a row."""
    where = f"{row['method']:20} B{row['batch']:<3} {row['context']:>6}"
    if "skipped" in row:
        return f"{where} skipped: {row['skipped']}"
    ratios = [f"{row[name]:6.2f}x" if name in row else "      -" for name in ("ratio", "ratio_standalone")]
    return f"{where} {row['tok_s']:9.1f} tok/s {row['step_ms']:8.2f} ms a step {' '.join(ratios)}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--contexts", nargs="+", type=int, default=[8000, 32000])
    parser.add_argument("--text", type=Path, default=DEMO_TEXT, help="what prompts of real models are made of")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--trace", action="store_true", help="also profile some steps of each row")
    add_run_options(parser)
    return parser.parse_args(arguments)


def row_keys(args: argparse.Namespace) -> list[Row]:
    """Name all rows: engine by engine, the largest sizes first, since their prompts hold the others'."""
    accept = args.accept_length if args.target in SHAPES else "real"
    sizes = list(itertools.product(sorted(args.contexts, reverse=True), sorted(args.batches, reverse=True)))
    return [
        row_key(method, args) | dict(accept=accept, batch=batch, context=context)
        for method in args.methods
        for context, batch in sizes
    ]


def run(args: argparse.Namespace, models: Models, results: Results) -> None:
    """Measure all rows that are not there yet."""
    keys = row_keys(args)
    left = [key for key in keys if not results.find(**key)]
    print(f"{len(left)} rows to measure, {len(keys) - len(left)} are there", flush=True)
    engine: RunningEngine | None = None
    try:
        for key in progress(left, Deadline(args.minutes), "row"):
            if engine is None or engine.method != key["method"]:
                if engine is not None:
                    engine.shutdown()
                engine = RunningEngine(key["method"], models, args)
            with alone(args.gate):
                row = with_ratios(key | measure(engine, key["batch"], key["context"], args), results)
            results.add(row)
            tqdm.write(describe(row))
    finally:
        if engine is not None:
            engine.shutdown()


def main() -> None:
    """Run the command line."""
    args = parse()
    settings: dict[str, Any] = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}
    with tempfile.TemporaryDirectory() as folder:
        models = find_models(args, Path(folder))
        kind = ("dummy", "forced") if models.dummy else ("real", "real")
        run_of = describe_run() | dict(zip(("weights", "acceptance"), kind))
        results = Results(args.json, KEY, settings, run_of, resume=args.resume, any_commit=args.any_commit)
        run(args, models, results)


if __name__ == "__main__":
    main()
