"""A dustin engine of real models; its settings are the process's ``DUSTIN_*`` variables."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from engine_options import prefill_graphs


def add_pair_options(parser: argparse.ArgumentParser) -> None:
    """Add models and draft shape."""
    parser.add_argument("--target", default=".models/smollm2")
    parser.add_argument("--draft", default=".models/smollm2-draft26")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--topk", type=int, default=1)
    parser.add_argument("--memory", type=float, default=0.85, help="SGLang's mem_fraction_static, on a GPU")
    parser.add_argument("--prefill-graphs", action="store_true", help="as end_to_end's, on a GPU")


def start_engine(args: argparse.Namespace, tokens: int, running: int = 1) -> Any:
    """Start an engine of the command line's models on a GPU, or on a CPU under ``python -m dustin_sglang.cpu``.

    Parameters
    ----------
    tokens
        Of the longest prompt with its answer.
    running
        Most requests at a time.
    """
    import sglang as sgl

    device: dict[str, Any] = (
        dict(
            dtype="bfloat16",
            mem_fraction_static=args.memory,
            **prefill_graphs(args),
            cuda_graph_max_bs_decode=running,
        )
        if torch.cuda.is_available()
        else dict(dtype="float32", device="cpu")
    )
    return sgl.Engine(
        model_path=args.target,
        speculative_algorithm="dustin",
        speculative_draft_model_path=args.draft,
        speculative_num_steps=args.steps,
        speculative_eagle_topk=args.topk,
        speculative_num_draft_tokens=args.steps + 1 if args.topk == 1 else args.topk * args.steps,
        max_running_requests=running,
        max_total_tokens=running * (2 * tokens + 1024),  # prompts stay cached beside what runs
        skip_tokenizer_init=True,
        grammar_backend="none",
        log_level="warning",
        **device,
    )
