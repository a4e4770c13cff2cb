"""Questions about the demo's document, for an engine of real models that answers them one at a time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from real_engine import add_pair_options
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
    add_pair_options(parser)
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS), help="ask only the first questions")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=new_tokens)
    parser.add_argument("--json", type=Path)


def make_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of the first `count` questions, each behind the document."""
    document = load_case().document
    messages = [[{"role": "user", "content": f"{document}\n\n{question}"}] for question in QUESTIONS[:count]]
    return [tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=False) for m in messages]


def longest(prompts: list[list[int]], args: argparse.Namespace) -> int:
    """Tokens of the longest prompt with its answer."""
    return max(map(len, prompts)) + args.new_tokens


def write_result(args: argparse.Namespace, **parts: dict[str, Any] | list[Row]) -> None:
    """Write the run, the command line and `parts` to ``--json``, if that was given."""
    if args.json:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(dict(run=describe_run(), settings=settings, **parts), indent=1) + "\n")
