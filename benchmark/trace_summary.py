"""What a PyTorch profiler trace says of a decode step: GPU time by kind of kernel, and host synchronisations."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

KINDS = {  # first match wins
    "score": ("_block_statistics_kernel", "_combine_kernel", "_sum_kernel"),
    "select": ("_select_kernel", "_write_slots_kernel", "_pack_tree_mask_kernel"),
    "attention": ("BatchPrefill", "BatchDecode", "MergeStates", "PersistentVariableLengthMergeStates"),
    "gemm": ("gemm", "cutlass", "nvjet", "cublas"),
}
SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def summarise_trace(path: Path) -> dict[str, Any]:
    """Summarise one trace.

    A step is one sampling of accepted tokens, found by SGLang's verification kernel (or, without speculation, by its
    decode graph launches).

    Returns
    -------
    dict
        ``steps``, ``gpu_us`` a step by kind, ``host_syncs`` a step by CUDA call and ``launches`` a step.
    """
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    time_by_kind: dict[str, float] = defaultdict(float)
    syncs: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for event in events:
        category, name = event.get("cat"), event.get("name", "")
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            names[name] += 1
            time_by_kind[_kind(name)] += event["dur"]
        elif category == "cuda_runtime":
            names[name] += 1
            if name in SYNCHRONISING:
                syncs[name] += 1
    verified = sum(count for name, count in names.items() if "VerifyTreeGreedy" in name)
    steps = max(1, verified or names["cudaGraphLaunch"])
    launches = (
        names["cudaLaunchKernel"] + names["cudaLaunchKernelExC"] + names["cuLaunchKernelEx"] + names["cuLaunchKernel"]
    )
    return dict(
        steps=steps,
        gpu_us={kind: round(total / steps, 1) for kind, total in sorted(time_by_kind.items())},
        host_syncs={name: round(count / steps, 2) for name, count in sorted(syncs.items())},
        launches=round(launches / steps, 1),
        graphs=round(names["cudaGraphLaunch"] / steps, 2),
    )


def _kind(name: str) -> str:
    return next((kind for kind, marks in KINDS.items() if any(mark in name for mark in marks)), "other")
