"""The four kinds of context that quality is measured on, as passages with teacher-forced windows.

- prose, code: an excerpt of a file; windows are spread over its last quarter.
- needles: prose with 14 facts planted in it, then a question about each with its answer; a window at each answer.
- jumps: prose with 15 facts, then questions that ask for three of their numbers in order; windows follow each other
  closely through the answers, so that they straddle the jumps from one fact to the next.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from dustin_sglang.calibrate.texts import Texts

TASKS = ("prose", "needles", "jumps", "code")
EXCERPT_WINDOWS = 10  # of a passage of prose or code
GENERATED = 64  # tokens of prose or code since the end of what `snapkv` takes for the prompt
NEEDLES, JUMP_NEEDLES, JUMPS, NUMBERS = 14, 15, 5, 3
JUMP_STEP = 3  # tokens from a window of an answer to the next: fewer than the rows of a verification
_PLACES = ("lighthouse", "customs house", "quarry", "mill", "abbey", "brewery", "observatory", "smithy", "granary",
           "tannery", "vicarage", "foundry", "dairy", "barracks", "theatre")  # fmt: skip
_WORDS = ("lantern", "copper", "willow", "saddle", "harbour", "velvet", "thistle", "marble", "orchard", "gravel")


@dataclass(frozen=True)
class Place:
    """A window: its committed length, and the length at which the prompt before it ended."""

    length: int
    prompt: int


@dataclass(frozen=True)
class Passage:
    """A text and its windows, in order; beyond each window lie its verified rows and the token after them."""

    ids: list[int]
    places: list[Place]


def make_passage(task: str, texts: Texts, number: int, context: int, rows: int, seed: int) -> Passage:
    """Passage `number` of a task; its last window has `context` committed tokens, or a few fewer.

    Raises
    ------
    CalibrationError
        A file is too short.
    ValueError
        The context is too short for facts and questions.
    """
    if task in ("prose", "code"):
        ids = texts.draw(number, f"{task} {number}", context + rows + 1)
        distance = context // 4 // EXCERPT_WINDOWS
        lengths = [context - i * distance for i in reversed(range(EXCERPT_WINDOWS))]
        return Passage(ids, [Place(n, n - GENERATED) for n in lengths])
    draw = random.Random(f"{seed} {task} {number}")
    facts, questions = (_needles if task == "needles" else _jumps)(draw)
    asked = [(texts.encode(question), texts.encode(answer)) for question, answer in questions]
    planted = [texts.encode(f"\n\n{fact}\n\n") for fact in facts]
    spoken = sum(len(question) + len(answer) for question, answer in asked)
    tail = texts.encode("\n\nQuestion: Which") * (rows + 1)  # after the last answer
    prose = context - spoken - sum(map(len, planted))
    if prose < len(planted):
        shortest = context - prose + len(planted)
        raise ValueError(f"--contexts {context}: must be at least {shortest} for --tasks {task} with these tokens")
    ids = texts.draw(number, f"{task} {number}", prose)
    for start, fact in zip(sorted(draw.sample(range(len(ids)), len(planted)), reverse=True), planted):
        ids[start:start] = fact
    places = []
    for question, answer in asked:
        start = len(ids) + len(question)
        last = len(answer) - rows - 1 if task == "jumps" else 0
        places += [Place(start + i, start) for i in range(0, max(last, 0) + 1, JUMP_STEP)]
        ids = ids + question + answer
    return Passage(ids + tail, places)


def _needles(draw: random.Random) -> tuple[list[str], list[tuple[str, str]]]:
    """Facts, and questions with their answers."""
    codes = {place: " ".join(draw.sample(_WORDS, 3)) + f" {draw.randint(1000, 9999)}" for place in _PLACES[:NEEDLES]}
    facts = [f"The safe of the {place} opens with the code {code}." for place, code in codes.items()]
    questions = [
        (f"\n\nQuestion: Which code opens the safe of the {place}?\nAnswer: The code is", f" {code}.")
        for place, code in draw.sample(sorted(codes.items()), NEEDLES)
    ]
    return draw.sample(facts, NEEDLES), questions


def _jumps(draw: random.Random) -> tuple[list[str], list[tuple[str, str]]]:
    """Facts, and questions that ask for several numbers in order, with their answers."""
    numbers = {place: draw.randint(1000, 9999) for place in _PLACES[:JUMP_NEEDLES]}
    facts = [f"The safe of the {place} opens with the number {number}." for place, number in numbers.items()]
    questions = []
    for _ in range(JUMPS):
        places = draw.sample(sorted(numbers), NUMBERS)
        named = ", ".join(f"the {place}" for place in places)
        question = f"\n\nQuestion: Which numbers open the safes of {named}, in this order?\nAnswer: The numbers are"
        questions.append((question, " " + ", ".join(str(numbers[place]) for place in places) + "."))
    return draw.sample(facts, JUMP_NEEDLES), questions
