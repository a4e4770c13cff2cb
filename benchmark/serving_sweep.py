"""`sglang.bench_serving` against a server of each engine, at several input lengths and request rates.

    python3 benchmark/serving_sweep.py --inputs 8192 32768 --rates 0.25 0.5 1 2 --json benchmark/results/serving.json

Models are given as in end_to_end.py; a shape gets a tokenizer of made-up words. Prompts are "random-ids", the same for
every engine. A row holds the throughput, the time to the first token and the time between tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import requests
from engine_options import ENGINE_KEY, add_engine_options, alone, find_models, flags, options, row_key, set_environment
from results import Deadline, Results, Row, add_run_options, describe_run, progress
from shapes import SHAPES
from tqdm import tqdm

from dustin_sglang.demo.server import Server

KEY = (*ENGINE_KEY, "accept", "input", "output", "rate")
FIELDS = {  # of bench_serving's output, and what a row calls them
    "completed": "completed",
    "output_throughput": "tok_s",
    "input_throughput": "input_tok_s",
    "median_ttft_ms": "ttft_p50_ms",
    "p99_ttft_ms": "ttft_p99_ms",
    "median_itl_ms": "itl_p50_ms",
    "p99_itl_ms": "itl_p99_ms",
    "accept_length": "accept_length",
    "concurrency": "concurrency",
    "duration": "seconds",
}


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a tokenizer whose token i is the word "ti", so that bench_serving can count tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{i}": i for i in range(3, vocab_size)} | {"<unk>": 0, "<s>": 1, "</s>": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"})
    )


def bench_arguments(args: argparse.Namespace, url: str, model: Path, key: Row, output: Path) -> list[str]:
    """Return the arguments of a row's bench_serving: about --seconds of requests, at least --min-requests."""
    requests_ = max(args.min_requests, round(args.seconds * key["rate"]))
    return [
        "--backend", "sglang", "--base-url", url,
        "--model", str(model), "--tokenizer", str(model), "--dataset-name", "random-ids", "--tokenize-prompt",
        "--random-input-len", str(key["input"]), "--random-output-len", str(key["output"]),
        "--random-range-ratio", "1.0", "--num-prompts", str(requests_), "--request-rate", str(key["rate"]),
        "--seed", "1", "--flush-cache", "--disable-tqdm", "--output-file", str(output),
    ]  # fmt: skip


def run_bench(arguments: list[str], log: Path) -> bool:
    """Run `sglang.bench_serving` in a fork of this process, its output in `log`; return whether it succeeded.

    A process of its own for each row would import SGLang again, which takes as long as many a row.
    """
    import sglang.bench_serving

    def bench() -> None:
        with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            sys.argv = ["bench_serving", *arguments]
            try:
                sglang.bench_serving.cli_main()
            except Exception:
                traceback.print_exc()
                sys.exit(1)

    process = multiprocessing.get_context("fork").Process(target=bench)
    process.start()
    process.join()
    return process.exitcode == 0


def read_output(text: str) -> Row:
    """Return a row's fields from the last line that bench_serving wrote."""
    result = json.loads(text.splitlines()[-1])
    values = {name: result.get(field) for field, name in FIELDS.items()}
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in values.items()}


def measure(args: argparse.Namespace, url: str, model: Path, key: Row) -> Row:
    """Return what a row holds beside its key."""
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "bench.jsonl", Path(folder) / "log"
        succeeded = run_bench(bench_arguments(args, url, model, key, output), log)
        if not succeeded or not output.exists():
            return dict(skipped=f"bench_serving failed: {log.read_text().strip().splitlines()[-1:]}")
        return read_output(output.read_text())


def capacity(url: str) -> int:
    """KV slots of a server."""
    return int(requests.get(f"{url}/server_info", timeout=60).json()["max_total_num_tokens"])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--inputs", nargs="+", type=int, default=[8192, 32768], help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.25, 0.5, 1.0, 2.0], help="requests a second")
    parser.add_argument("--seconds", type=float, default=30, help="about how long requests arrive in a row")
    parser.add_argument("--min-requests", type=int, default=8)
    parser.add_argument("--max-running", type=int, default=16, help="requests that a server runs at once")
    add_run_options(parser)
    return parser.parse_args(arguments)


def row_keys(args: argparse.Namespace) -> list[Row]:
    """Name all rows, engine by engine."""
    accept = args.accept_length if args.target in SHAPES else "real"
    return [
        row_key(method, args) | dict(accept=accept, input=length, output=args.output, rate=rate)
        for method in args.methods
        for length in args.inputs
        for rate in args.rates
    ]


def describe(row: Row) -> str:
    """One line a row."""
    where = f"{row['method']:20} input {row['input']:>6} at {row['rate']:g}/s"
    if "skipped" in row:
        return f"{where} skipped: {row['skipped']}"
    return (
        f"{where} {row['tok_s']:8.1f} tok/s  first token {row['ttft_p50_ms']:.0f} / {row['ttft_p99_ms']:.0f} ms"
        f"  between {row['itl_p50_ms']:.1f} / {row['itl_p99_ms']:.1f} ms (p50 / p99)"
    )


def serve(args: argparse.Namespace, method: str, models: Any) -> Server:
    """Return the server of an engine, not started yet."""
    set_environment(method, models, args)
    context = max(args.inputs) + args.output + 256
    arguments = flags(options(method, models, args, args.max_running, context))
    return Server([sys.executable, "-m", "sglang.launch_server", *arguments], method)


def run(args: argparse.Namespace, models: Any, results: Results) -> None:
    """Measure all rows that are not there yet, a server for each engine that has some."""
    keys = row_keys(args)
    left = [key for key in keys if not results.find(**key)]
    print(f"{len(left)} rows to measure, {len(keys) - len(left)} are there", flush=True)
    server: Server | None = None
    method = None
    try:
        for key in progress(left, Deadline(args.minutes), "row"):
            if key["method"] != method:
                if server is not None:
                    server.stop()
                method = key["method"]
                server = serve(args, method, models).__enter__()
            assert server is not None
            if key["input"] + key["output"] > capacity(server.url):
                row = key | dict(skipped="a request does not fit in the KV cache")
            else:
                with alone(args.gate):
                    row = key | measure(args, server.url, models.target, key)
            results.add(row)
            tqdm.write(describe(row))
    finally:
        if server is not None:
            server.stop()


def main() -> None:
    """Run the command line."""
    args = parse()
    settings = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}
    with tempfile.TemporaryDirectory() as folder:
        models = find_models(args, Path(folder))
        if models.dummy:
            write_tokenizer(models.target, SHAPES[args.target]["vocab_size"])
        kind = ("dummy", "forced") if models.dummy else ("real", "real")
        run_of = describe_run() | dict(zip(("weights", "acceptance"), kind))
        run(args, models, Results(args.json, KEY, settings, run_of, resume=args.resume, any_commit=args.any_commit))


if __name__ == "__main__":
    main()
