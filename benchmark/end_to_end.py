"""Decode throughput of whole engines: no speculation, STANDALONE and dustin, one after the other in one run.

    python3 benchmark/end_to_end.py --batch 8 --context 32000 --accept-length 3 --json benchmark/results/end_to_end.json

Weights are dummies and acceptance is forced (SGLANG_SIMULATE_ACC_LEN), so the rows say how fast a step is and nothing
about quality. Prompts are prefilled once into the radix cache; throughput is the difference of two generations of
different lengths over these, so that neither prefill nor start-up is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from shapes import write_shape
from trace_summary import summarise_trace

SHORT, LONG, REPEATS = 32, 160, 3


def measure(method: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one engine and return its row."""
    import sglang as sgl

    os.environ["DUSTIN_BUDGET"] = str(args.budget)
    os.environ["SGLANG_PROFILE_WITH_STACK"] = os.environ["SGLANG_PROFILE_RECORD_SHAPES"] = "false"
    os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(args.accept_length)
    speculation: dict[str, Any] = {}
    if method != "none":
        steps = args.steps
        speculation = dict(
            speculative_algorithm=method,
            speculative_draft_model_path=str(write_shape(args.draft, folder)),
            speculative_num_steps=steps,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=steps + 1,
        )
    engine = sgl.Engine(
        model_path=str(write_shape(args.target, folder)),
        load_format="dummy",
        skip_tokenizer_init=True,
        grammar_backend="none",
        attention_backend="flashinfer",
        disable_prefill_cuda_graph=True,
        cuda_graph_max_bs_decode=args.batch,
        max_running_requests=args.batch,
        context_length=args.context + 1024,
        mem_fraction_static=0.85,
        chunked_prefill_size=16384,
        log_level="warning",
        **speculation,
    )
    try:
        draw = random.Random(0)
        prompts = [[draw.randrange(10, 100000) for _ in range(args.context)] for _ in range(args.batch)]

        def seconds(new_tokens: int) -> float:
            start = time.perf_counter()
            engine.generate(
                input_ids=prompts,
                sampling_params=dict(temperature=0, max_new_tokens=new_tokens, ignore_eos=True),
            )
            return time.perf_counter() - start

        seconds(1)
        seconds(SHORT)
        rates = []
        for _ in range(REPEATS):
            rates.append(args.batch * (LONG - SHORT) / (seconds(LONG) - seconds(SHORT)))
        rate = statistics.median(rates)
        accept = 1.0 if method == "none" else args.accept_length
        row = dict(
            method=method,
            tok_s=round(rate, 1),
            spread=[round(min(rates), 1), round(max(rates), 1)],
            step_ms=round(1000 * args.batch * accept / rate, 2),
        )
        if args.trace:
            row["step"] = profile(engine, seconds, args, method)
        return row
    finally:
        engine.shutdown()


def profile(engine: Any, seconds: Any, args: argparse.Namespace, method: str) -> dict[str, Any]:
    """Trace some decode steps; GPU time by kind of kernel and host synchronisations, a step."""
    with tempfile.TemporaryDirectory() as folder:
        engine.start_profile(output_dir=folder, activities=["CPU", "GPU"])
        seconds(SHORT)
        engine.stop_profile()
        for _ in range(60):
            if traces := sorted(Path(folder).rglob("*.trace.json.gz")):
                time.sleep(2)
                break
            time.sleep(1)
        return summarise_trace(traces[-1])


def main() -> None:
    """Measure every method and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="llama-3.1-8b")
    parser.add_argument("--draft", default="draft-0.5b")
    parser.add_argument("--methods", nargs="+", default=["none", "STANDALONE", "dustin"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=32000)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--accept-length", type=float, default=3.0)
    parser.add_argument("--trace", action="store_true", help="also profile some steps of each engine")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for method in args.methods:
            rows.append(measure(method, args, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    base = {row["method"]: row["tok_s"] for row in rows}
    print(f"\n{'method':12} {'tok/s':>9} {'ms/step':>9} {'over none':>10} {'over STANDALONE':>16}")
    for row in rows:
        over = [row["tok_s"] / base[m] if m in base else float("nan") for m in ("none", "STANDALONE")]
        print(f"{row['method']:12} {row['tok_s']:9.1f} {row['step_ms']:9.2f} {over[0]:10.2f} {over[1]:16.2f}")
    if args.json:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"run": describe_run(), "settings": settings, "rows": rows}, indent=1) + "\n")


def describe_run() -> dict[str, Any]:
    """Machine, versions, command and commit of this run."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return dict(
        machine=torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        versions={name: version(name) for name in ("torch", "sglang", "flashinfer-python", "triton")},
        command=" ".join(sys.argv),
        commit=os.environ.get("DUSTIN_COMMIT", commit or "unknown"),
        weights="dummy",
        acceptance="forced",
        date=time.strftime("%Y-%m-%d"),
    )


if __name__ == "__main__":
    main()
