"""Passages to measure on: prose as it stands, and every other one with a needle, a question and its answer."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dustin_sglang.calibrate.trace import CalibrationError

WINDOWS_A_PASSAGE = 2
WINDOW_DISTANCE = 4  # of a needle's windows: both lie in the answer
_CHARACTERS_A_TOKEN = 8  # more than any tokenizer needs on average, so that a passage is long enough
_FRONT_MATTER = 0.02  # share of a file at its beginning that is skipped: titles, contents, licences
_PLACES = ("lighthouse", "customs house", "quarry", "mill", "abbey", "brewery", "observatory", "smithy", "granary")
_WORDS = ("lantern", "copper", "willow", "saddle", "harbour", "velvet", "thistle", "marble", "orchard", "gravel")


@dataclass(frozen=True)
class Needle:
    """Where a planted fact and the answer about it are.

    Attributes
    ----------
    span
        Half-open range of the fact.
    answer
        Half-open range of the answer.
    """

    span: tuple[int, int]
    answer: tuple[int, int]

    def shifted(self, by: int) -> Needle:
        """The same needle where every token has moved."""
        return Needle(*((start + by, end + by) for start, end in (self.span, self.answer)))


@dataclass(frozen=True)
class Passage:
    """A text with the places where a verification is measured.

    Attributes
    ----------
    ids
        Tokens; the verified rows of every window are among them.
    lengths
        Committed lengths of the windows.
    needle
        The needle, if it has one.
    """

    ids: list[int]
    lengths: list[int]
    needle: Needle | None


class Texts:
    """Passages of some files, drawn with a seed.

    Parameters
    ----------
    files
        UTF-8 text files.
    tokenizer
        The target's, of transformers.
    context
        Committed length of a passage's last window, roughly.
    rows
        Verified rows.

    Raises
    ------
    CalibrationError
        A file that cannot be read.
    """

    def __init__(self, files: list[Path], tokenizer: Any, context: int, rows: int, seed: int) -> None:
        try:
            self._texts = [file.read_text(encoding="utf-8") for file in files]
        except (OSError, UnicodeDecodeError) as error:
            raise CalibrationError(f"--text: {error}") from error
        self._files, self._tokenizer = files, tokenizer
        self._context, self._rows, self._seed = context, rows, seed

    def passage(self, number: int) -> Passage:
        """Passage `number`: even ones are prose, odd ones have a needle.

        Raises
        ------
        CalibrationError
            A file is too short.
        """
        if number % 2:
            return self._with_needle(number)
        ids = self.draw(number // 2, str(number), self._context + self._rows)
        distance = self._context // (2 * WINDOWS_A_PASSAGE)
        lengths = [self._context - i * distance for i in reversed(range(WINDOWS_A_PASSAGE))]
        return Passage(ids, lengths, None)

    def _with_needle(self, number: int) -> Passage:
        draw = random.Random(f"{self._seed} needle {number}")
        place = _PLACES[number // 2 % len(_PLACES)]
        phrase = " ".join(draw.sample(_WORDS, 3)) + f" {draw.randint(1000, 9999)}"
        fact = self.encode(f"\n\nThe safe of the {place} opens with the code {phrase}.\n\n")
        question = self.encode(f"\n\nQuestion: Which code opens the safe of the {place}?\nAnswer: The code is")
        answer = self.encode(f" {phrase}.\n\nQuestion:")
        haystack = self.draw(number // 2, str(number), self._context - len(fact) - len(question))
        start = draw.randint(len(haystack) // 10, len(haystack) * 9 // 10)
        before = haystack[:start] + fact + haystack[start:] + question
        # The first verification starts from the answer's first token, which a prefill gives.
        lengths = [len(before) + i * WINDOW_DISTANCE for i in range(WINDOWS_A_PASSAGE)]
        ids = (before + answer + haystack)[: lengths[-1] + self._rows]
        spoken = len(self.encode(f" {phrase}"))
        return Passage(
            ids, lengths, Needle((start, start + len(fact)), (len(before), min(len(before) + spoken, len(ids))))
        )

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special ones."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def draw(self, file: int, name: str, tokens: int) -> list[int]:
        """Tokens from a place in a file that depends on the seed and on `name`; files are counted round and round.

        Raises
        ------
        CalibrationError
            The file is too short.
        """
        index = file % len(self._texts)
        text, wanted = self._texts[index], tokens * _CHARACTERS_A_TOKEN
        first, last = int(len(text) * _FRONT_MATTER), max(len(text) - wanted, 0)
        start = random.Random(f"{self._seed} {name}").randint(min(first, last), last)
        # A tokenizer warns of texts beyond the model's length; only the beginning of this one is used.
        ids = self._tokenizer(text[start : start + wanted], verbose=False)["input_ids"][:tokens]
        if len(ids) < tokens:
            raise CalibrationError(
                f"--text {self._files[index]} has {len(ids)} tokens from character {start} on; a passage of this "
                f"--context needs {tokens}: give longer texts or a shorter --context"
            )
        return list(ids)


def hash_texts(files: Sequence[Path]) -> str:
    """16 hexadecimal digits that name the contents of some files."""
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]
