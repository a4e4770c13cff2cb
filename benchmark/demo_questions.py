"""Questions about the demo's document, and an engine of real models that answers them one at a time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from results import Row, describe_run

from dustin_sglang.demo.case import load_case

QUESTIONS = (
    load_case().question,
    "Who is Barrymore, and what does he look like?",
    "Describe the house as the travellers first see it.",
    "Why are there soldiers on the road?",
    "What sound does the narrator hear at night?",
    "Summarise this chapter in three sentences.",
)


def add_options(parser: argparse.ArgumentParser, new_tokens: int) -> None:
    """Add what is asked of whom; `new_tokens` is the default length of an answer."""
    parser.add_argument("--target", default=".models/smollm2")
    parser.add_argument("--draft", default=".models/smollm2-draft26")
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS), help="ask only the first questions")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=new_tokens)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--topk", type=int, default=1)
    parser.add_argument("--json", type=Path)


def make_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of the first `count` questions, each behind the document."""
    document = load_case().document
    messages = [[{"role": "user", "content": f"{document}\n\n{question}"}] for question in QUESTIONS[:count]]
    return [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]


def start_engine(args: argparse.Namespace, prompts: list[list[int]]) -> Any:
    """Start a dustin engine for one request at a time; its settings are the process's ``DUSTIN_*`` variables."""
    import sglang as sgl

    room = 2 * max(map(len, prompts)) + 2 * args.new_tokens + 1024
    device: dict[str, Any] = (
        dict(dtype="bfloat16", mem_fraction_static=0.5, disable_prefill_cuda_graph=True)
        if torch.cuda.is_available()
        else dict(dtype="float32", device="cpu", max_total_tokens=room)
    )
    return sgl.Engine(
        model_path=args.target,
        speculative_algorithm="dustin",
        speculative_draft_model_path=args.draft,
        speculative_num_steps=args.steps,
        speculative_eagle_topk=args.topk,
        speculative_num_draft_tokens=args.steps + 1 if args.topk == 1 else args.topk * args.steps,
        max_running_requests=1,
        skip_tokenizer_init=True,
        grammar_backend="none",
        log_level="warning",
        **device,
    )


def write_result(args: argparse.Namespace, **parts: dict[str, Any] | list[Row]) -> None:
    """Write the run, the command line and `parts` to ``--json``, if that was given."""
    if args.json:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(dict(run=describe_run(), settings=settings, **parts), indent=1) + "\n")
