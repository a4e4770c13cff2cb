"""What a profiler trace says of a decode step: GPU time by kind of kernel and by phase, host synchronisations."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

KINDS = {  # first match wins
    "score": ("statistics_kernel", "sum_again_kernel", "sum_stored_kernel"),
    "select": ("_select_kernel", "_shortlist_kernel", "_write_slots_kernel", "_pack_tree_mask_kernel"),
    "attention": ("BatchPrefill", "BatchDecode", "MergeStates", "PersistentVariableLengthMergeStates", "attend_kernel"),
    "gemm": ("gemm", "cutlass", "nvjet", "cublas"),
}
PHASES = ("draft", "score+select", "verify", "sample", "draft-extend")
_GRAPHS = ("draft-extend", "draft", "verify")  # SGLang's graphs from one acceptance to the next
_ACCEPTANCE = ("VerifyTreeGreedy", "TreeSpeculativeSampling")
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx", "cuLaunchKernel")
SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class _Work(NamedTuple):
    """One kernel or copy on the device."""

    start: float
    duration: float
    name: str
    graph: int | None  # correlation id of the graph launch that it belongs to


def summarise_trace(path: Path) -> dict[str, Any]:
    """Summarise one trace.

    A step is one acceptance of drafted tokens, found by its kernel (or, without speculation, a graph launch).

    Returns
    -------
    dict
        ``steps``, ``gpu_us`` a step by kind, ``host_syncs`` a step by CUDA call and ``launches`` a step; these count
        the whole trace. ``phases`` counts whole steps only, see `summarise_phases`.
    """
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    calls = Counter(event["name"] for event in events if event.get("cat") == "cuda_runtime")
    work = _device_work(events)
    time_by_kind: dict[str, float] = defaultdict(float)
    for item in work:
        time_by_kind[_kind(item.name)] += item.duration
    steps = max(1, sum(map(_accepts, work)) or calls["cudaGraphLaunch"])
    return dict(
        steps=steps,
        gpu_us={kind: round(total / steps, 1) for kind, total in sorted(time_by_kind.items())},
        host_syncs={name: round(calls[name] / steps, 2) for name in sorted(SYNCHRONISING) if calls[name]},
        launches=round(sum(calls[name] for name in _LAUNCHES) / steps, 1),
        graphs=round(calls["cudaGraphLaunch"] / steps, 2),
        phases=summarise_phases(work),
    )


def _device_work(events: Sequence[dict[str, Any]]) -> list[_Work]:
    """Everything that ran on the device, in order; a kernel of a graph has the correlation id of its launch."""
    graphs = {
        event["args"]["correlation"]
        for event in events
        if event.get("cat") == "cuda_runtime" and event["name"] == "cudaGraphLaunch"
    }
    work = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            correlation = event.get("args", {}).get("correlation")
            graph = correlation if correlation in graphs else None
            work.append(_Work(event["ts"], event["dur"], event["name"], graph))
    return sorted(work, key=lambda item: item.start)


def summarise_phases(work: Sequence[_Work]) -> dict[str, Any]:
    """GPU time of a step by phase and kind.

    From one acceptance to the next SGLang launches three graphs: draft extend, draft, verification. What runs outside
    of them belongs to what it prepares or follows: up to the draft extend it is sampling, up to the draft drafting, up
    to the verification verification, after that sampling; kernels that score or select are known by name. Steps with
    another number of graphs (around a prefill) are left out. Without speculation a step is a graph ("verify") and what
    follows it ("sample").

    Returns
    -------
    dict
        ``steps`` that were counted, ``us`` a step by phase and kind, ``idle_us`` a step in which nothing ran.
    """
    marks = [index for index, item in enumerate(work) if _accepts(item)]
    order = _GRAPHS
    if not marks:
        marks = _first_of_graphs(work)
        order = ("verify",)
    times: dict[str, dict[str, float]] = {phase: defaultdict(float) for phase in PHASES}
    steps, idle = 0, 0.0
    for begin, end in pairwise(marks):
        # An acceptance ends its step; a plain decode graph begins it.
        step = work[begin + 1 : end + 1] if order == _GRAPHS else work[begin:end]
        graphs = list(dict.fromkeys(item.graph for item in step if item.graph is not None))
        if len(graphs) != len(order):
            continue
        steps += 1
        idle += _idle(step, since=work[begin].start + work[begin].duration if order == _GRAPHS else step[0].start)
        for item, phase in zip(step, _phases(step, dict(zip(graphs, order)), order)):
            times[phase][_kind(item.name)] += item.duration
    return dict(
        steps=steps,
        us={
            phase: {kind: round(total / steps, 1) for kind, total in sorted(kinds.items())}
            for phase, kinds in times.items()
            if kinds
        },
        idle_us=round(idle / max(1, steps), 1),
    )


def _phases(step: Sequence[_Work], phase_of_graph: dict[int | None, str], order: Sequence[str]) -> list[str]:
    """The phase of each piece of work of a step."""
    phases, started = [], 0
    for item in step:
        if item.graph is not None:
            started = max(started, order.index(phase_of_graph[item.graph]) + 1)
            phases.append(phase_of_graph[item.graph])
        elif _kind(item.name) in ("score", "select"):
            phases.append("score+select")
        else:
            phases.append(order[started] if 0 < started < len(order) else "sample")
    return phases


def _first_of_graphs(work: Sequence[_Work]) -> list[int]:
    first: dict[int, int] = {}
    for index, item in enumerate(work):
        if item.graph is not None:
            first.setdefault(item.graph, index)
    return sorted(first.values())


def _idle(step: Sequence[_Work], since: float) -> float:
    idle, busy_until = 0.0, since
    for item in step:
        idle += max(0.0, item.start - busy_until)
        busy_until = max(busy_until, item.start + item.duration)
    return idle


def _accepts(item: _Work) -> bool:
    return any(mark in item.name for mark in _ACCEPTANCE)


def _kind(name: str) -> str:
    return next((kind for kind, marks in KINDS.items() if any(mark in name for mark in marks)), "other")
