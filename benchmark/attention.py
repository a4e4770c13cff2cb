"""Verification attention and selection on one GPU, for real model shapes: dense, sparse, with and without selection.

    python3 benchmark/attention.py --json benchmark/results/attention.json [--resume] [--minutes 9]
    python3 benchmark/attention.py --shapes qwen2.5-72b --batches 1 16 --contexts 32768 --ks 512

One CUDA graph holds a step: the attention of all layers, g rows a request, over as many layers' KV pools as the memory
holds, in turn; where that would take too long, fewer layers. It is replayed on a cold L2; `median_us` is the median, a
layer, and `step_us` that times the layers. A row with "+selection" has the whole selection of a step in its graph, and
its layers read the list that comes out: its `median_us` holds a layer's share of that. The selection alone and its
parts are times a step, `score-...` over the heads that `lookahead` names. `floor_us` is the time of the bytes that any
implementation moves, at --bandwidth; `ratio` is dense FlashInfer's `median_us` over the row's. Queries and KV are
random numbers.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import floors
import torch
from attention_methods import DENSE, SELECTED, SPARSE, DoesNotFit, Step, dense_step, parts, selected_step, sparse_step
from pools import Arena, Cell, Workload
from results import Deadline, Results, Row, add_run_options, describe_run, progress
from selection_chain import SINKS, WINDOW, scored_heads, scored_layers
from shapes import ATTENTION_SHAPES
from timing import GraphTimer, Timing
from tqdm import tqdm

KEY = ("shape", "batch", "context", "g", "slots", "k", "method", "lookahead", "groups")
SCORES, CHOICES = ("score-lookahead", "score-history"), ("select", "write-slots")
GROUPS = {
    "dense": (*DENSE, "roofline"),
    "sparse": (*SPARSE, *SELECTED),
    "selection": (*SCORES, *CHOICES, "selection"),
}
METHODS = tuple(itertools.chain(*GROUPS.values()))
_BASE = dict(k=None, method="flashinfer", lookahead=None, groups=None)
MAX_FAILURES = 10


def row_keys(args: argparse.Namespace, shape: str, batch: int, context: int) -> list[Row]:
    """Name the rows of a cell, the baseline first."""
    cell = dict(shape=shape, batch=batch, context=context, g=args.g, slots=args.slots)
    keys = [dict(k=None, method=method, lookahead=None) for method in (*DENSE, "roofline")]
    keys += [dict(k=None, method=method, lookahead=heads) for method in SCORES for heads in args.lookahead]
    for k in args.ks:
        keys += [dict(k=k, method=method, lookahead=None) for method in (*SPARSE, *CHOICES)]
        keys += [
            dict(k=k, method=method, lookahead=heads, groups=groups if groups > 1 else None)
            for method in (*SELECTED, "selection")
            for heads in args.lookahead
            for groups in args.groups
        ]
    return [
        cell | dict(groups=None) | key for key in keys if key["method"] in args.methods and (key["k"] or 0) < context
    ]


class CellRunner:
    """Measures the rows of one cell.

    Parameters
    ----------
    work
        Its tensors.
    timer
        Times calls.
    bandwidth
        TB/s of the floors.
    """

    def __init__(self, work: Workload, timer: GraphTimer, bandwidth: float) -> None:
        self._work, self._timer, self._bandwidth = work, timer, bandwidth
        self._flashinfer: dict[int | None, torch.Tensor] = {}

    def measure(self, method: str, k: int | None, lookahead: str | None, groups: int = 1) -> Row:
        """Return what a row holds beside its key; `skipped` says why it holds nothing."""
        floor_us = self._floor(method, k, lookahead, groups)
        if method == "roofline":
            return self._attention_row(floor_us, floor_us)
        try:
            if method in GROUPS["selection"]:
                call = parts(self._work, k or SINKS + WINDOW, lookahead or "3x4", groups)[method]
                timing = self._timer.time([call], whole=True)
                return _row(timing.median_us, floor_us) | _spread(timing, 1)
            return self._attention(self._step(method, k, lookahead, groups), method, k, floor_us)
        except (DoesNotFit, torch.cuda.OutOfMemoryError) as error:
            torch.cuda.empty_cache()
            return dict(skipped=str(error).split("\n")[0])

    def _step(self, method: str, k: int | None, lookahead: str | None, groups: int) -> Step:
        if k is None:
            return dense_step(method, self._work)
        if lookahead is None:
            return sparse_step(method, self._work, k)
        return selected_step(method, self._work, k, lookahead, groups)

    def _attention(self, step: Step, method: str, k: int | None, floor_us: float) -> Row:
        difference = {} if method in SELECTED else self._compare(step, method, k)
        timing = self._timer.time(step.calls, whole=method in SELECTED)
        layers = timing.calls - (method in SELECTED)
        return (
            self._attention_row(timing.median_us / layers, floor_us)
            | _spread(timing, layers)
            | dict(layers_timed=layers, pools=min(layers, len(self._work.keys)), lists=step.lists)
            | difference
        )

    def _compare(self, step: Step, method: str, k: int | None) -> Row:
        """Largest difference of the first layer's output from FlashInfer's over the same list."""
        step.calls[0]()
        if method.startswith("flashinfer"):
            self._flashinfer[k] = step.out.clone()
            return {}
        if k not in self._flashinfer:
            return {}
        return dict(difference=round((step.out - self._flashinfer[k]).abs().max().item(), 4))

    def _attention_row(self, median_us: float, floor_us: float) -> Row:
        return _row(median_us, floor_us) | dict(step_us=round(median_us * self._work.cell.target.layers, 1))

    def _floor(self, method: str, k: int | None, lookahead: str | None, groups: int) -> float:
        cell = self._work.cell
        ahead, history = scored_heads(lookahead or "3x4", cell.target, cell.draft)
        selection = {
            "score-lookahead": lambda: floors.score_bytes(cell, ahead),
            "score-history": lambda: floors.score_bytes(cell, history),
            "select": lambda: groups * floors.select_bytes(cell, k or 0),
            "write-slots": lambda: groups * floors.write_bytes(cell, k or 0),
        }
        if method in selection:
            num_bytes: float = selection[method]()
        else:
            whole = sum(part() for part in selection.values()) if lookahead else 0
            num_bytes = whole
            if method != "selection":
                num_bytes = floors.attention_bytes(cell, k or cell.context) + whole / cell.target.layers
        return floors.microseconds(num_bytes, self._bandwidth)


def _row(median_us: float, floor_us: float) -> Row:
    return dict(median_us=round(median_us, 2), floor_us=round(floor_us, 2), over_floor=round(median_us / floor_us, 2))


def _spread(timing: Timing, layers: int) -> Row:
    return dict(spread=[round(timing.min_us / layers, 2), round(timing.max_us / layers, 2)], repeats=timing.repeats)


def with_ratio(row: Row, results: Results) -> Row:
    """Add dense FlashInfer's time over the row's, and the share of selection in a step that has one.

    The share is what the step takes longer than one of the same attention over lists that are there already.
    """
    if "step_us" not in row:
        return row
    key = {field: row.get(field) for field in KEY}
    ratios = {}
    base = row if row["method"] == "flashinfer" else results.find(**key | _BASE)
    if base and "step_us" in base:
        ratios["ratio"] = round(base["median_us"] / row["median_us"], 2)
    if row["method"] in SELECTED:
        alone = results.find(**key | dict(method=row["method"].removesuffix("+selection"), lookahead=None, groups=None))
        if alone and "step_us" in alone:
            ratios["selection_share"] = round(1 - alone["step_us"] / row["step_us"], 3)
    return row | ratios


def describe(row: Row) -> str:
    """One line a row."""
    where = f"{row['shape']:17} B{row['batch']:<3} {row['context']:>6} k {row['k'] or '-':>4}"
    what = f"{row['method']} {row['lookahead'] or ''}" + (f", {row['groups']} lists" if row.get("groups") else "")
    if "skipped" in row:
        return f"{where} {what:34} skipped: {row['skipped']}"
    ratio = f"{row['ratio']:7.2f}x" if "ratio" in row else ""
    return f"{where} {what:34} {row['median_us']:9.2f} us {row['over_floor']:6.2f} of its floor {ratio}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(ATTENTION_SHAPES), choices=list(ATTENTION_SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--ks", nargs="+", type=int, default=[128, 256, 512, 1024])
    parser.add_argument(
        "--methods", nargs="+", default=list(GROUPS), choices=[*GROUPS, *METHODS], metavar="METHOD",
        help=f"groups {', '.join(GROUPS)}; or single ones: {', '.join(METHODS)}",
    )  # fmt: skip
    parser.add_argument("--lookahead", nargs="+", default=["3x4", "half"], choices=["3x4", "3xall", "half"])
    parser.add_argument("--groups", nargs="+", type=int, default=[1], help="groups of layers with a list each")
    parser.add_argument("--g", type=int, default=5, help="tokens under verification a request")
    parser.add_argument("--slots", choices=["contiguous", "scattered"], default="contiguous")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s of the floors (a copy on one H200)")
    parser.add_argument("--arena-gib", type=float, default=90, help="memory for KV pools")
    parser.add_argument("--repeats", type=int, default=30, help="most replays of a graph")
    add_run_options(parser)
    args = parser.parse_args(arguments)
    args.methods = sorted({name for method in args.methods for name in GROUPS.get(method, (method,))})
    if min(args.groups) < 1:
        parser.error(f"--groups has {min(args.groups)}; it must be at least 1")
    if args.g < 2:
        parser.error(f"--g is {args.g}; it must be at least 2")
    if min(args.ks) < SINKS + WINDOW:
        parser.error(f"--ks has {min(args.ks)}; it must be at least {SINKS + WINDOW}, sinks and window")
    return args


def cell_of(args: argparse.Namespace, key: Row) -> Cell:
    """Return the cell that a row belongs to."""
    target, draft = ATTENTION_SHAPES[key["shape"]]
    return Cell(target, draft, key["batch"], key["context"], args.g, args.slots)


def run(args: argparse.Namespace, results: Results, timer: GraphTimer, device: str = "cuda") -> None:
    """Measure all rows that are not there yet."""
    cells = itertools.product(args.shapes, args.contexts, args.batches)
    keys = [key for shape, context, batch in cells for key in row_keys(args, shape, batch, context)]
    left = [key for key in keys if not results.find(**key)]
    print(f"{len(left)} rows to measure, {len(keys) - len(left)} are there", flush=True)
    arena = Arena(int(args.arena_gib * 2**30), device)

    @functools.lru_cache(maxsize=1)
    def runner(cell: Cell) -> CellRunner:
        layers = max(scored_layers(lookahead, cell.draft) for lookahead in args.lookahead)
        return CellRunner(Workload(cell, arena, device, layers), timer, args.bandwidth)

    failures = 0
    for key in progress(left, Deadline(args.minutes), "row"):
        try:
            row = runner(cell_of(args, key)).measure(key["method"], key["k"], key["lookahead"], key["groups"] or 1)
        except MemoryError as error:
            row = dict(skipped=str(error))
        except Exception as error:  # one method's fault; the other rows are still worth their time
            tqdm.write(f"failed: {key}: {type(error).__name__}: {error}")
            failures += 1
            if failures == MAX_FAILURES:
                break
            continue
        row = with_ratio(key | row, results)
        results.add(row)
        tqdm.write(describe(row))
    if failures:
        raise SystemExit(f"{failures} rows failed; they are not in the file")


def main() -> None:
    """Run the command line."""
    args = parse()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU")
    settings: dict[str, Any] = {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()}
    run_of = describe_run() | dict(weights="none", kv="random")
    results = Results(args.json, KEY, settings, run_of, resume=args.resume, any_commit=args.any_commit)
    run(args, results, GraphTimer(args.repeats))


if __name__ == "__main__":
    main()
