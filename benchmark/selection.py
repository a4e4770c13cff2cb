"""Time of the selection kernels on one GPU, beside the bytes that any implementation has to move.

    python benchmark/selection.py [--bs 8] [--context 32000] [--budget 512] [--slots scattered] [--json]

Each call runs on a cold L2 (a large buffer is written before it) between two CUDA events; the median of --repeats is
shown. `host` is the median time that a call takes to return. `of floor` is the time of the floor's bytes at --bandwidth
over the measured time.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from dustin_kernels import score_positions, select_positions, write_slots

L2_FLUSH_BYTES = 256 * 2**20


@dataclass
class Row:
    """One line of the table."""

    name: str
    microseconds: float
    host_microseconds: float
    floor_bytes: int
    percent_of_floor: float


def median_times(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median time of a call on the device and on the host, in microseconds."""
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    device, host = [], []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        flush.zero_()  # longer than the call takes to enqueue, so that no launch gap is measured
        start.record()
        before = time.perf_counter()
        call()
        host.append((time.perf_counter() - before) * 1e6)
        end.record()
        torch.cuda.synchronize()
        device.append(start.elapsed_time(end) * 1e3)
    return statistics.median(device), statistics.median(host)


def score_case(
    args: argparse.Namespace, device: str, *, rows: int, layers: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[Callable[[], object], int]:
    """A call of `score_positions` over all heads of some layers, and its floor in bytes."""
    num_slots = args.bs * args.context
    order = torch.randperm if args.slots == "scattered" else torch.arange
    req_to_token = order(num_slots, device=device).int().view(args.bs, args.context)
    k_cache = [torch.randn(num_slots, kv_heads, head_dim, device=device).bfloat16() for _ in range(layers)]
    q = torch.randn(args.bs, rows, layers * heads, head_dim, device=device).bfloat16()
    layer_of_head = tuple(layer for layer in range(layers) for _ in range(heads))
    kv_head_of_head = tuple(head * kv_heads // heads for head in range(heads)) * layers
    req_pool_indices = torch.arange(args.bs, device=device)
    seq_lens = torch.full((args.bs,), args.context, device=device)
    out = torch.empty(args.bs, args.context, device=device)

    def call() -> object:
        return score_positions(
            q, k_cache, layer_of_head, kv_head_of_head, req_to_token, req_pool_indices, seq_lens, head_dim**-0.5,
            max_len=args.context, shift=1, out=out,
        )  # fmt: skip

    return call, num_slots * (layers * kv_heads * head_dim * q.element_size() + 4 + 4)


def select_case(args: argparse.Namespace, device: str, bs: int, context: int) -> tuple[Callable[[], object], int]:
    """A call of `select_positions` on two signals, and its floor in bytes."""
    lookahead, history = torch.randn(2, bs, context, device=device).mul_(3).softmax(2).unbind()
    seq_lens = torch.full((bs,), context, device=device)
    out = torch.empty(bs, args.budget, dtype=torch.int32, device=device)
    sinks, window = min(4, args.budget), min(64, max(args.budget - 4, 0))

    def call() -> object:
        return select_positions(
            lookahead, history, seq_lens, budget=args.budget, sinks=sinks, window=window,
            num_lookahead=(args.budget - sinks - window) // 2, out=out,
        )  # fmt: skip

    return call, bs * (8 * context + 4 * args.budget)


def slots_case(args: argparse.Namespace, device: str, drafts: int = 5) -> tuple[Callable[[], object], int]:
    """A call of `write_slots` after a selection, and its floor in bytes."""
    width = args.context + drafts
    req_to_token = torch.randperm(args.bs * width, device=device).int().view(args.bs, width)
    positions = torch.rand(args.bs, args.context, device=device).topk(args.budget).indices.sort().values.int()
    seq_lens = torch.full((args.bs,), args.context, device=device)
    req_pool_indices = torch.arange(args.bs, device=device)
    kv_indptr = torch.arange(args.bs + 1, device=device, dtype=torch.int32) * (args.budget + drafts)
    kv_indices = torch.empty(args.bs * (args.budget + drafts), dtype=torch.int32, device=device)

    def call() -> object:
        write_slots(positions, seq_lens, req_pool_indices, req_to_token, kv_indptr, drafts, kv_indices)
        return kv_indices

    return call, args.bs * (12 * args.budget + 8 * drafts)


def cases(args: argparse.Namespace, device: str) -> dict[str, Callable[[], tuple[Callable[[], object], int]]]:
    """Each case by name, built when it is called."""
    draft = dict(rows=5, layers=3, heads=14, kv_heads=2, head_dim=64)
    target = dict(rows=1, layers=1, heads=32, kv_heads=8, head_dim=128)
    return {
        "score_positions, draft 3 layers x 14 heads, 5 rows": lambda: score_case(args, device, **draft),
        "score_positions, target 1 layer x 32 heads, 1 row": lambda: score_case(args, device, **target),
        "select_positions": lambda: select_case(args, device, args.bs, args.context),
        "select_positions, bs 16, context 131072": lambda: select_case(args, device, 16, 131072),
        "write_slots": lambda: slots_case(args, device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bs", type=int, default=8)
    parser.add_argument("--context", type=int, default=32000)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--slots", choices=["scattered", "contiguous"], default="scattered")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s of the floor (default: a copy on one H200)")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    if not 0 < args.budget <= args.context:
        parser.error(f"--budget is {args.budget}; it must be from 1 to --context ({args.context})")
    if not torch.cuda.is_available():
        parser.error("this benchmark needs a CUDA GPU")

    rows = []
    for name, build in cases(args, "cuda").items():
        call, floor_bytes = build()
        microseconds, host = median_times(call, args.repeats)
        percent = 100 * floor_bytes / (args.bandwidth * 1e6) / microseconds
        rows.append(Row(name, microseconds, host, floor_bytes, percent))
        del call
        torch.cuda.empty_cache()
    if args.json:
        environment = dict(gpu=torch.cuda.get_device_name(), torch=torch.__version__, **vars(args))
        print(json.dumps(dict(environment=environment, rows=[asdict(row) for row in rows]), indent=2))
        return
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, bs {args.bs}, context {args.context}, budget {args.budget}, {args.slots} slots")
    print(f"{'':52}{'us':>9}{'host us':>9}{'floor MB':>10}{'of floor':>10}")
    for row in rows:
        print(
            f"{row.name:52}{row.microseconds:9.1f}{row.host_microseconds:9.1f}"
            f"{row.floor_bytes / 1e6:10.2f}{row.percent_of_floor:9.1f}%"
        )


if __name__ == "__main__":
    main()
