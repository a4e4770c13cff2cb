r"""Run the kernels of a verification once each, for a profiler to read their counters.

    ncu --profile-from-start off --section SpeedOfLight --section MemoryWorkloadAnalysis --section Occupancy \
        --section WarpStateStats python3 benchmark/kernel_counters.py --lookahead 3xall

The sizes are those of `benchmark/attention.py`: real model shapes, random numbers, a cold L2.
"""

from __future__ import annotations

import argparse

import torch
from attention_methods import parts, sparse_step
from pools import Arena, Cell, Workload
from selection_chain import scored_layers
from shapes import ATTENTION_SHAPES


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-72b", choices=list(ATTENTION_SHAPES))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--k", type=int, default=512)
    parser.add_argument("--lookahead", default="3x4", choices=["3x4", "3xall", "half"])
    args = parser.parse_args()
    target, draft = ATTENTION_SHAPES[args.shape]
    cell = Cell(target, draft, args.batch, args.context, g=5)
    layers = scored_layers(args.lookahead, draft)
    keys = layers * draft.kv_heads * draft.head_dim * 2
    arena = Arena(cell.num_slots * (keys + 4 * target.layer_bytes), "cuda")
    work = Workload(cell, arena, "cuda", layers)
    selection = parts(work, args.k, args.lookahead)
    del selection["selection"]  # all of the others
    calls = [*selection.values(), sparse_step("ours-sparse", work, args.k).calls[0]]
    for call in calls:  # compiles, and copies tables to the device
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for call in calls:
        call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
