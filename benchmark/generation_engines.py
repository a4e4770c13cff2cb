"""Let an engine for each setting answer the items."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from generation_answers import Answer, Answers, Setting
from generation_items import Item, encode
from real_engine import start_engine
from results import Deadline, Row, progress

CHUNKS = 4  # batches of one call, whose answers are written together


def answer_all(
    items: Sequence[Item], settings: Sequence[Setting], answers: Answers, run: Row, tokenizer: Any,
    args: argparse.Namespace,
) -> None:  # fmt: skip
    """Answer what `answers` lacks.

    Raises
    ------
    ValueError
        A prompt with its answer is longer than the target's context.
    """
    deadline = Deadline(args.minutes)
    prompts = {item.id: encode(item, tokenizer) for item in items}
    check_lengths(items, prompts, Path(args.target))
    for setting in settings:
        done = answers.done(setting, run, args.any_commit) if args.resume else set()
        pending = [item for item in items if item.id not in done]
        print(f"{setting}: {len(pending)} of {len(items)} items", flush=True)
        if pending and not deadline.passed:
            _answer(pending, prompts, setting, answers, tokenizer, deadline, args)


def check_lengths(items: Sequence[Item], prompts: dict[str, list[int]], target: Path) -> None:
    """Refuse items that do not fit in the target's context.

    Raises
    ------
    ValueError
        Such an item.
    """
    room = json.loads((target / "config.json").read_text())["max_position_embeddings"]
    for item in items:
        tokens = len(prompts[item.id]) + item.new_tokens
        if tokens >= room:
            raise ValueError(
                f"--items: {item.id} has {tokens} tokens with its answer, --target {target} a context of {room}; "
                "leave these --contexts out"
            )


def _answer(
    items: Sequence[Item], prompts: dict[str, list[int]], setting: Setting, answers: Answers, tokenizer: Any,
    deadline: Deadline, args: argparse.Namespace,
) -> None:  # fmt: skip
    os.environ |= setting.environment(args.profile)
    longest = max(len(prompts[item.id]) + item.new_tokens for item in items)
    engine = start_engine(args, longest, args.running)
    size = CHUNKS * args.running
    chunks = [items[start : start + size] for start in range(0, len(items), size)]
    try:
        for chunk in progress(chunks, deadline, "batch"):
            outputs = engine.generate(
                input_ids=[prompts[item.id] for item in chunk],
                sampling_params=[
                    dict(temperature=item.temperature, max_new_tokens=item.new_tokens, ignore_eos=item.ignore_eos)
                    for item in chunk
                ],
            )
            answers.add([_to_answer(item, output, setting, tokenizer) for item, output in zip(chunk, outputs)])
    finally:
        engine.shutdown()


def _to_answer(item: Item, output: dict[str, Any], setting: Setting, tokenizer: Any) -> Answer:
    ids = output["output_ids"]
    verifications = output["meta_info"].get("spec_verify_ct", 0)  # absent where the prefill's token was the last
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Answer(item.id, str(setting), text, ids, verifications)
