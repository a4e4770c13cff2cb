"""Long answers: an excerpt is to go on for a fixed number of tokens, so that sparse verification can drift.

They are sampled: a small model that goes on greedily soon repeats itself, however it attends, and what it repeats it
predicts with certainty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from generation_items import Item

from dustin_sglang.calibrate.texts import Texts

TASK = "continue"


def make_items(
    files: Sequence[Path], context: int, count: int, new_tokens: int, tokenizer: Any, seed: int
) -> Iterator[Item]:
    """Excerpts of the files, round and round, without a chat template.

    Parameters
    ----------
    context
        Tokens of the excerpt and of what comes after it.

    Raises
    ------
    ValueError
        No room for an excerpt.
    CalibrationError
        A file is too short.
    """
    texts, room = Texts(list(files), tokenizer, context, 0, seed), context - new_tokens
    if room < 1:
        raise ValueError(f"--contexts {context}: leaves no room for a text beside --new-tokens {new_tokens}")
    for number in range(count):
        prompt = tokenizer.decode(texts.draw(number, f"{TASK} {context} {number}", room))
        name = f"{TASK}-{context}-{number}"
        yield Item(name, TASK, context, prompt, [], "", new_tokens, chat=False, ignore_eos=True, temperature=1.0)
