"""Long answers: a long text is to be retold in a fixed number of tokens, so that sparse verification can drift."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from generation_items import Item, chat_overhead

from dustin_sglang.calibrate.texts import Texts

TASK = "retell"
REQUEST = "\n\nRetell this text in your own words, from its beginning to its end and in as much detail as you can."


def make_items(
    files: Sequence[Path], context: int, count: int, new_tokens: int, tokenizer: Any, seed: int
) -> Iterator[Item]:
    """Excerpts of the files, round and round, each with the request to retell it.

    Parameters
    ----------
    context
        Tokens of the excerpt, the request, the chat template and the answer.

    Raises
    ------
    ValueError
        No room for an excerpt.
    CalibrationError
        A file is too short.
    """
    texts = Texts(list(files), tokenizer, context, 0, seed)
    room = context - new_tokens - chat_overhead(tokenizer) - len(texts.encode(REQUEST))
    if room < 1:
        raise ValueError(f"--contexts {context}: leaves no room for a text beside --new-tokens {new_tokens}")
    for number in range(count):
        text = tokenizer.decode(texts.draw(number, f"{TASK} {context} {number}", room))
        prompt = text + REQUEST
        yield Item(f"{TASK}-{context}-{number}", TASK, context, prompt, [], "", new_tokens, ignore_eos=True)
