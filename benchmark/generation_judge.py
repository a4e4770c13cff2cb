"""Let the dense target read the long answers of all settings, on any machine: how far they have drifted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from dense_judge import judge, load_judge
from generation_answers import BUCKET, Answer, Answers
from generation_items import Item, encode
from results import Deadline, progress


def judge_all(
    items: Sequence[Item], answers: Answers, tokenizer: Any, target: str | Path, minutes: float | None = None
) -> int:
    """Judge what ignored the end of sequence and was not judged yet, an item at a time; return how many answers."""
    pending: list[tuple[Item, list[Answer]]] = []
    for item in items if answers.runs else ():
        found = [answers.of(setting).get(item.id) for setting in answers.settings()]
        unjudged = [entry[1] for entry in found if entry and entry[1].ids and entry[1].agreement is None]
        if item.ignore_eos and unjudged:
            pending.append((item, unjudged))
    model, count = load_judge(target) if pending else None, 0
    for item, unjudged in progress(pending, Deadline(minutes), "item"):
        verdicts = judge(model, encode(item, tokenizer), [answer.ids for answer in unjudged])
        for answer, (agrees, logprobs) in zip(unjudged, verdicts, strict=True):
            judged = replace(answer, agreement=bucket_means(agrees.float()), logprob=bucket_means(logprobs))
            answers.replace(judged)
        answers.rewrite()
        count += len(unjudged)
    return count


def bucket_means(values: torch.Tensor) -> list[float]:
    """Means over every `BUCKET` values; a last bucket may be shorter."""
    return [round(part.mean().item(), 4) for part in values.split(BUCKET)]
