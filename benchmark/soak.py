"""Mixed traffic on a real server with SGLang's strict memory check: leaks, wrong answers, throughput a minute.

    python3 benchmark/soak.py --seconds 560 --json benchmark/results/soak.json
    python3 benchmark/soak.py --budget 8192 --page-size 16 --seconds 560 --json ... --dustin-rectify-interval 64
    python3 benchmark/soak.py --budget 8192 --page-size 16 --seconds 560 --json ... --algorithm STANDALONE
    python3 benchmark/soak.py --budget 8192 --page-size 16 --seconds 560 --json ... --dtype float16

Without a GPU it runs SGLang's CPU engine.
Short and long prompts, samplers, penalties, grammars, stops, second turns, aborts, clients that leave, and bursts over
the server's capacity into a small KV pool, so that requests are retracted and the radix cache evicts. Greedy requests
within the budget are compared with their solo run; with --algorithm STANDALONE the same ones, so that the share that
differs is that of SGLang's own dense speculation. A row names the differences with the largest gaps (soak_verdict.py).
Options that are not listed go to the server. --seconds is the whole command's time, the start of the server included;
the exit status is 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import requests
import torch
from prometheus_client.parser import text_string_to_metric_families
from results import Results, Row, describe_run
from soak_material import real_material
from soak_traffic import Load, Traffic
from soak_verdict import report
from transformers import AutoConfig

from dustin_sglang.demo.server import Server, ServerError

# SGLang counts its pools after every batch, not only when it is idle, and stops at the first difference.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
TIE = 0.125  # nats: what bf16 rounding was seen to turn on a GPU (test/gpu/test_exactness.py)
LAST_SECONDS = 35  # kept for the end of the traffic and of the server, and for the judge of differences
DUSTIN, STANDALONE = ALGORITHMS = ("dustin", "STANDALONE")
CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
MINUTE = 60.0
COUNTERS = {
    "retractions": "sglang:num_retracted_requests_total",
    "evicted_tokens": "sglang:evicted_tokens_total",
    "verifications": "dustin:verify_steps_total",
    "sparse_verifications": "dustin:sparse_verify_steps_total",
    "rectifications": "dustin:rectifications_total",
    "monitored_steps": "dustin:monitored_request_steps_total",
}


def launch(args: argparse.Namespace, extra: Sequence[str]) -> list[str]:
    """Return the server's command, without its address."""
    options = ["--model-path", args.model, "--speculative-draft-model-path", args.draft]
    options += ["--speculative-algorithm", args.algorithm]
    # What dustin chooses for a whole-model draft.
    options += CHAIN if args.algorithm == STANDALONE else ["--dustin-budget", str(args.budget)]
    options += ["--page-size", str(args.page_size), "--max-running-requests", str(args.max_running)]
    options += ["--max-total-tokens", str(args.max_total_tokens), "--mem-fraction-static", str(args.mem_fraction)]
    # Optimistic admission, so that running requests meet a full pool, and chunks, so that prefills mix with decodes.
    options += ["--schedule-conservativeness", "0.1", "--chunked-prefill-size", str(args.chunk), "--enable-metrics"]
    if not torch.cuda.is_available():
        options += ["--dtype", "float32", "--sleep-on-idle"]
        return [sys.executable, "-m", "dustin_sglang.cpu", "sglang.launch_server", *options, *extra]
    options += ["--dtype", args.dtype, "--attention-backend", "flashinfer", "--disable-prefill-cuda-graph"]
    options += ["--cuda-graph-max-bs-decode", str(args.max_running)]
    return [sys.executable, "-m", "sglang.launch_server", *options, *extra]


def strict() -> bool:
    """Whether a server that starts now checks its pools after every batch."""
    return all(os.environ.get(name) == value for name, value in STRICT.items())


def make_load(args: argparse.Namespace) -> Load:
    """Return the load that the command line asks for."""
    return Load(
        budget=args.budget,
        context=args.context,
        slots=args.max_total_tokens,
        running=args.max_running,
        clients=args.clients,
        burst=args.burst,
        tie=TIE if torch.cuda.is_available() else 0.0,
        seed=args.seed,
        stock=args.algorithm == STANDALONE,
    )


def soak(server: Server, traffic: Traffic, end: float) -> Row:
    """Send `traffic` until `end`, on the clock of `time.monotonic`; return a row of what came of it."""
    memory, start = _memory(), time.monotonic()
    traffic.run(end)
    seconds = time.monotonic() - start
    row: Row = dict(traffic.counts) | dict(seconds=round(seconds), tokens=sum(count for _, count in traffic.tokens))
    try:
        held = _held(server.url)
        row |= _counters(server.url)
    except requests.RequestException as error:
        traffic.errors.append(f"after the traffic: {error!r}")
        held = 0
    log = server.log.read_text(errors="replace")
    row |= dict(
        tok_s_by_minute=by_minute(traffic.tokens, start, end),
        host_memory_growth_mib=(_memory() - memory) >> 20,
        leaks=log.count("leak detected") + log.count("Leak Detected") + (held > 0),
        wrong=len(traffic.wrong),
        errors=len(traffic.errors) + log.count("Traceback"),
        examples=[text[:500] for text in (*traffic.wrong[:3], *traffic.errors[:3])],
    )
    return row


def by_minute(tokens: Sequence[tuple[float, int]], start: float, end: float, minute: float = MINUTE) -> list[float]:
    """Return tokens a second of each whole minute from `start` to `end`."""
    totals = [0] * int((end - start + 1) / minute)  # a second short of a minute is one
    for when, count in tokens:
        index = int((when - start) / minute)
        if index < len(totals):
            totals[index] += count
    return [round(total / minute, 1) for total in totals]


def faults(row: Row) -> list[str]:
    """Name what a soak must not show."""
    found = [f"{name}: {row[name]}" for name in ("leaks", "wrong", "errors") if row[name]]
    rates = row["tok_s_by_minute"]
    if len(rates) >= 4 and min(rates[-2:]) < 0.5 * statistics.median(rates):
        found.append(f"throughput has fallen: {rates}")
    return found


def _held(url: str, patience: float = 30.0) -> int:
    """KV slots that are held when the server is idle and its cache is flushed, after `patience` seconds at most."""
    deadline = time.monotonic() + patience
    while True:
        flushed = requests.post(f"{url}/flush_cache", timeout=30).ok
        loads = requests.get(f"{url}/v1/loads", params={"include": "core"}, timeout=30).json()["loads"]
        held = sum(load["num_total_tokens"] for load in loads)
        if (flushed and held == 0) or time.monotonic() > deadline:
            return held
        time.sleep(0.5)


def _counters(url: str) -> dict[str, int]:
    """COUNTERS of the server, added up over labels."""
    page = requests.get(f"{url}/metrics", timeout=30).text
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    return {name: int(totals.get(counter, 0)) for name, counter in COUNTERS.items()}


def _memory() -> int:
    """Resident bytes of all processes that this one started."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; what it does not list is for the server."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", default=".models/smollm2")
    parser.add_argument("--draft", default=".models/smollm2-draft26")
    parser.add_argument("--algorithm", default=DUSTIN, choices=ALGORITHMS)
    parser.add_argument("--budget", type=int, default=512, help="k; greedy requests of at most k tokens are compared")
    parser.add_argument("--context", type=int, help="longest request with its answer; default: what the model takes")
    parser.add_argument("--max-total-tokens", type=int, help="KV slots; default: two of the longest requests")
    parser.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float16"], help="on a GPU; float16 rounds 8 times finer"
    )
    parser.add_argument("--mem-fraction", type=float, default=0.2, help="bound of the memory that is taken")
    parser.add_argument("--max-running", type=int, default=8, help="requests that the server runs at once")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prefill")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--burst", type=int, default=24, help="requests of a burst")
    parser.add_argument("--seconds", type=float, default=560, help="of the whole command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="result file; a run is added to those that it holds")
    args, extra = parser.parse_known_args(arguments)
    if args.algorithm == STANDALONE and (ours := [option for option in extra if option.startswith("--dustin-")]):
        parser.error(f"--algorithm {STANDALONE} has no {', '.join(ours)}")
    if args.context is None:
        args.context = AutoConfig.from_pretrained(args.model).max_position_embeddings
    args.max_total_tokens = args.max_total_tokens or 2 * args.context
    if args.max_total_tokens < args.context:
        parser.error(f"--max-total-tokens {args.max_total_tokens}: at least --context, which is {args.context}")
    return args, extra


def main() -> int:
    """Run the command line; return the exit status."""
    started = time.monotonic()
    args, extra = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server must not outlive this process
    os.environ |= {name: value for name, value in STRICT.items() if name not in os.environ}
    load = make_load(args)
    settings: dict[str, Any] = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}
    pair = f"{Path(args.model).name} + {Path(args.draft).name}"
    try:
        with Server(launch(args, extra), "soak") as server:
            print(f"server's log: {server.log}", flush=True)
            traffic = Traffic(server.url, real_material(args.model), load)
            end = started + args.seconds - LAST_SECONDS
            traffic.prepare(end)
            row = dict(pair=pair, algorithm=args.algorithm) | soak(server, traffic, end)
    except ServerError as error:
        print(error, file=sys.stderr)
        return 1
    row["differences"] = report(args.model, traffic.differences, load.tie)
    # The file is read only now: several soaks may share it, and a GPU.
    Results(args.json, ("pair", "algorithm"), settings | {"server": extra, "strict": strict()}, describe_run()).add(row)
    print(row)
    for fault in (found := faults(row)):
        print(f"FAULT {fault}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
