"""Items that a generation answers: a prompt, the answers that count, and how they are scored; a JSON line each."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any


@dataclass(frozen=True)
class Item:
    """One prompt and what a good answer is.

    Attributes
    ----------
    id
        Unique in a file.
    task
        Name of the task in results.
    context
        Length in tokens that the task was made for; the prompt with its answer is somewhat shorter.
    prompt
        What the user says, or with ``chat`` false the whole text to complete.
    answers
        References; empty where nothing is scored.
    metric
        One of `generation_metrics.METRICS`.
    new_tokens
        Most tokens of an answer.
    prefix
        Beginning of the answer that the prompt already holds.
    chat
        Whether the tokenizer's chat template is applied, if it has one.
    classes
        All labels of a classification task.
    ignore_eos
        Whether exactly `new_tokens` are generated.
    temperature
        0: greedily.
    """

    id: str
    task: str
    context: int
    prompt: str
    answers: list[str]
    metric: str
    new_tokens: int
    prefix: str = ""
    chat: bool = True
    classes: list[str] | None = None
    ignore_eos: bool = False
    temperature: float = 0.0


def encode(item: Item, tokenizer: Any) -> list[int]:
    """Token ids of the item's prompt.

    Parameters
    ----------
    tokenizer
        The target's, of transformers.
    """
    if not item.chat or tokenizer.chat_template is None:
        return list(tokenizer(item.prompt + item.prefix, verbose=False)["input_ids"])
    messages = [{"role": "user", "content": item.prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + item.prefix
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def chat_overhead(tokenizer: Any) -> int:
    """Tokens that the chat template adds to a prompt."""
    return len(encode(Item("", "", 0, "", [], "", 0), tokenizer))


def write_items(path: Path, items: Iterable[Item]) -> None:
    """Write a file, compressed if its name ends in ``.xz``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _open(path, "wt") as file:
        for item in items:
            file.write(json.dumps(asdict(item), ensure_ascii=False) + "\n")


def read_items(path: Path) -> list[Item]:
    """Read a file that `write_items` wrote.

    Raises
    ------
    ValueError
        A line is no item, or two items have one id.
    """
    items: dict[str, Item] = {}
    with _open(path, "rt") as file:
        for number, line in enumerate(file, 1):
            try:
                item = Item(**json.loads(line))
            except (TypeError, json.JSONDecodeError) as error:
                raise ValueError(f"--items {path}, line {number}: {error}") from error
            if item.id in items:
                raise ValueError(f"--items {path}, line {number}: a second item has the id {item.id!r}")
            items[item.id] = item
    return list(items.values())


def choose_items(
    items: Sequence[Item], tasks: Sequence[str] | None, contexts: Sequence[int] | None, limit: int | None
) -> list[Item]:
    """Items of some tasks and contexts (None: all), the first `limit` of each task and context, longest contexts last.

    Raises
    ------
    ValueError
        A task or a context has no item.
    """
    for flag, wanted, there in (
        ("--tasks", tasks, {item.task for item in items}),
        ("--contexts", contexts, {item.context for item in items}),
    ):
        if absent := set(wanted or ()) - there:
            raise ValueError(f"{flag} {' '.join(map(str, absent))}: --items has {' '.join(map(str, sorted(there)))}")
    groups: dict[tuple[int, str], list[Item]] = {}
    for item in items:
        if (tasks is None or item.task in tasks) and (contexts is None or item.context in contexts):
            groups.setdefault((item.context, item.task), []).append(item)
    return [item for key in sorted(groups) for item in groups[key][:limit]]


def _open(path: Path, mode: str) -> IO[str]:
    return lzma.open(path, mode, encoding="utf-8") if path.suffix == ".xz" else open(path, mode, encoding="utf-8")
