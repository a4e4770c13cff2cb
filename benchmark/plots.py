"""Plots of the recorded results, for the README: PNG files from the JSON files.

    python3 benchmark/plots.py [--results benchmark/results] [--out docs]

Needs matplotlib (requirements/dev.txt), so it runs where the results are read, not where they were measured. Of rows
measured more than once the newest is drawn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attention
import end_to_end
import matplotlib
import quality
import serving_sweep
from engine_options import ENGINES, VARIANTS
from results import ROOT, Row, latest_rows, read_runs
from trace_summary import PHASES

from dustin_sglang.selection.policies import POLICIES

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402  (the backend comes first)
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

ATTENTION_STYLE = {  # method: label, colour, line
    "paper-like": ("eager over repeated KV (paper-like)", "tab:gray", ":"),
    "triton": ("dense, SGLang Triton", "tab:brown", "-"),
    "flashinfer": ("dense, FlashInfer fa2", "tab:red", "-"),
    "ours": ("dense, ours", "tab:orange", "-"),
    "roofline": ("dense, roofline", "black", "--"),
    "flashinfer-sparse": ("sparse, FlashInfer fa2", "tab:blue", "-"),
    "ours-sparse+selection": ("sparse, ours, with its share of selection", "tab:green", "--"),
    "ours-sparse": ("sparse, ours", "tab:green", "-"),
}
PHASE_COLOURS = dict(zip((*PHASES, "idle"), ("tab:blue", "tab:green", "tab:red", "tab:purple", "tab:orange", "silver")))


def plot_attention(rows: Sequence[Row], *, shape: str, batch: int, k: int) -> Figure | None:
    """Time of one layer against the context; None where no row has these sizes."""
    chosen = [
        row
        for row in rows
        if (row["shape"], row["batch"]) == (shape, batch)
        and row["k"] in (None, k)
        and row["lookahead"] in (None, "half")  # as the automatic profile scores these shapes
        and row["slots"] == "contiguous"
        and "step_us" in row
    ]
    if not chosen:
        return None
    figure, axes = pyplot.subplots(figsize=(7.5, 4.5))
    for method, (label, colour, line) in ATTENTION_STYLE.items():
        points = sorted((row["context"], row["median_us"]) for row in chosen if row["method"] == method)
        if points:
            axes.plot(*zip(*points), label=label, color=colour, linestyle=line, marker="o", markersize=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    contexts = sorted({row["context"] for row in chosen})
    axes.set_xticks(contexts, [f"{context // 1024}k" for context in contexts])
    _label(axes, f"{shape}, {batch} requests, k = {k}, {chosen[0]['g']} query rows", "context", "µs a layer")
    return figure


def plot_end_to_end(rows: Sequence[Row]) -> Figure | None:
    """Throughput by shape and size, a bar an engine; None without rows."""
    measured = _comparable(rows, "accept", "tp")
    if not measured:
        return None
    sizes = sorted({(row["shape"], row["context"], row["batch"]) for row in measured})
    figure, axes = pyplot.subplots(figsize=(max(5.0, 1.6 * len(sizes) + 2), 4.0))
    methods = [method for method in ENGINES if any(row["method"] == method for row in measured)]
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        of_method = (row for row in measured if row["method"] == method)
        bars = {(row["shape"], row["context"], row["batch"]): row["tok_s"] for row in of_method}
        places = [index + number * width for index, size in enumerate(sizes) if size in bars]
        axes.bar(places, [bars[size] for size in sizes if size in bars], width, label=method)
    centres = [index + width * (len(methods) - 1) / 2 for index in range(len(sizes))]
    axes.set_xticks(centres, [f"{shape}\n{batch} x {context:,}" for shape, context, batch in sizes])
    _label(axes, "decode throughput", "target's shape, requests x tokens of context", "tokens a second")
    return figure


def plot_step(rows: Sequence[Row]) -> Figure | None:
    """Where a step's time goes, at the largest size that was traced: stacked bars; None without traces."""
    traced = _comparable([row for row in rows if row.get("step", {}).get("phases", {}).get("us")])
    if not traced:
        return None
    size = max((row["context"], row["batch"]) for row in traced)
    chosen = [row for row in traced if (row["context"], row["batch"]) == size]
    chosen.sort(key=lambda row: ENGINES.index(row["method"]))
    figure, axes = pyplot.subplots(figsize=(7.5, 1.2 + 0.6 * len(chosen)))
    left = [0.0] * len(chosen)
    for phase, colour in PHASE_COLOURS.items():
        widths = [_phase_ms(row, phase) for row in chosen]
        axes.barh([row["method"] for row in chosen], widths, left=left, label=phase, color=colour)
        left = [start + width for start, width in zip(left, widths)]
    axes.invert_yaxis()
    _label(axes, f"one step, {_shapes(chosen)}, {size[1]} requests of {size[0]:,} tokens", "ms", "")
    return figure


def _phase_ms(row: Row, phase: str) -> float:
    phases = row["step"]["phases"]
    total = phases["idle_us"] if phase == "idle" else sum(phases["us"].get(phase, {}).values())
    return float(total) / 1000


def plot_serving(rows: Sequence[Row]) -> Figure | None:
    """Throughput, time to the first token and between tokens against the request rate; None without rows."""
    measured = _comparable(rows)
    if not measured:
        return None
    inputs = sorted({row["input"] for row in measured})
    panels = {
        "tok_s": "tokens a second",
        "ttft_p50_ms": "first token, p50, ms",
        "itl_p50_ms": "between tokens, p50, ms",
    }
    figure, grid = pyplot.subplots(len(inputs), 3, figsize=(12, 3.4 * len(inputs)), squeeze=False, layout="constrained")
    for line, length in zip(grid, inputs):
        for axes, (field, title) in zip(line, panels.items()):
            for number, method in enumerate(ENGINES):
                of_method = (row for row in measured if row["method"] == method and row["input"] == length)
                points = sorted((row["rate"], row[field]) for row in of_method)
                if points:
                    axes.plot(*zip(*points), label=method, color=f"C{number}", marker="o", markersize=3)
            _label(axes, f"{length:,} tokens in", "requests a second", title, legend=axes is line[-1])
    return figure


def plot_quality(rows: Sequence[Row]) -> Figure | None:
    """KL to dense against the budget, a panel a task, a line a method; None without rows.

    Drawn are the models, the context and the seed that have the most rows; of the profiles the one with weights for
    groups of layers, or else the automatic one, or else the first; and of lists for groups the oracle's and those that
    such weights make.
    """
    if not rows:
        return None
    sets: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        same = tuple(row[field] for field in ("model", "draft", "context", "rows", "dtype", "seed"))
        sets.setdefault(same, []).append(row)
    rows = max(sets.values(), key=len)
    profiles = [row["profile"] for row in rows if row["profile"] is not None]
    mixed = [row["profile"] for row in rows if row["policy"] == "hybrid-sum" and row["lookahead_share"] is None]
    first = next(iter([*mixed, *(name for name in profiles if name == "automatic"), *profiles]), None)
    rows = [row for row in rows if row["profile"] in (None, first)]
    rows = [
        row
        for row in rows
        if row.get("groups", 1) == 1
        or row["policy"] == quality.ORACLE
        or (mixed and POLICIES[row["policy"]].mixes and row.get("extra_step"))
    ]
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    figure, grid = pyplot.subplots(1, len(tasks), figsize=(4 * len(tasks), 4), squeeze=False, sharey=True)
    colours = pyplot.get_cmap("tab20").colors
    for axes, task in zip(grid[0], tasks):
        here = [row for row in rows if row["task"] == task]
        for colour, name in zip(colours, dict.fromkeys(map(quality.name_of, rows))):
            points = sorted((row["k"], row["kl"]) for row in here if quality.name_of(row) == name)
            if points:
                label = name.replace(f" ({first})", "")
                axes.plot(*zip(*points), label=label, color=colour, marker="o", markersize=3)
        ks = sorted({row["k"] for row in here})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ks, list(map(str, ks)))
        axes.set_yscale("log")
        title = f"{task}, {here[0]['context']:,} tokens, n = {here[0]['n']}"
        _label(axes, title, "k", "KL to dense, nats", legend=task == tasks[-1])
    return figure


def _comparable(rows: Sequence[Row], *fields: str) -> list[Row]:
    """Measured rows that have the newest one's fields, by default its target, acceptance and parallelism."""
    measured = [row for row in rows if "tok_s" in row]
    same = fields or ("shape", "accept", "tp")
    return [row for row in measured if all(row[field] == measured[-1][field] for field in same)]


def _shapes(rows: Sequence[Row]) -> str:
    return ", ".join(sorted({row["shape"] for row in rows}))


def _label(axes: Axes, title: str, x: str, y: str, *, legend: bool = True) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    if legend:
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))


def _as_started(file: Path, key: Sequence[str]) -> list[Row]:
    """Newest rows of engines that no option changed, whether with one list or with one for each group of layers."""
    rows = latest_rows(read_runs(file), [field for field in key if field != "layer_groups"])
    return [row for row in rows if all(row.get(field) is None for field in VARIANTS)]


def draw_all(results: Path, out: Path, *, shape: str, batch: int, k: int) -> list[Path]:
    """Draw every plot that has rows; return the files."""
    attention_rows = [
        row for row in latest_rows(read_runs(results / "attention.json"), attention.KEY) if row.get("groups") is None
    ]
    engine_rows = _as_started(results / "end_to_end.json", end_to_end.KEY)
    serving_rows = _as_started(results / "serving.json", serving_sweep.KEY)
    quality_rows = [row for row in latest_rows(read_runs(results / "quality.json"), quality.KEY) if "kl" in row]
    plots: dict[str, Callable[[], Figure | None]] = {
        "attention.png": lambda: plot_attention(attention_rows, shape=shape, batch=batch, k=k),
        "end_to_end.png": lambda: plot_end_to_end(engine_rows),
        "step_time.png": lambda: plot_step(engine_rows),
        "serving.png": lambda: plot_serving(serving_rows),
        "quality.png": lambda: plot_quality(quality_rows),
    }
    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, plot in plots.items():
        if figure := plot():
            figure.savefig(out / name, dpi=110, bbox_inches="tight")
            pyplot.close(figure)
            drawn.append(out / name)
    return drawn


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmark" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    parser.add_argument("--shape", default="qwen2.5-72b", help="of the attention plot")
    parser.add_argument("--batch", type=int, default=8, help="of the attention plot")
    parser.add_argument("--k", type=int, default=512, help="of the attention plot")
    args = parser.parse_args()
    for path in draw_all(args.results, args.out, shape=args.shape, batch=args.batch, k=args.k):
        print(path)


if __name__ == "__main__":
    main()
