"""Scores of answers, 0 to 1: RULER's string matches and LongBench's published metrics, by name."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from generation_items import Item

Metric = Callable[[str, Item], float]
_ByReference = Callable[[str, str], float]
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(item: Item, text: str) -> float | None:
    """Score of an answer, 0 to 100; None for an item without references."""
    return 100 * METRICS[item.metric](text, item) if item.answers else None


def all_answers(text: str, item: Item) -> float:
    """Share of the references that the answer holds, in whatever case (RULER's `string_match_all`)."""
    return sum(answer.lower() in text.lower() for answer in item.answers) / len(item.answers)


def any_answer(text: str, item: Item) -> float:
    """Whether the answer holds a reference, in whatever case (RULER's `string_match_part`)."""
    return float(any(answer.lower() in text.lower() for answer in item.answers))


def normalise(text: str) -> list[str]:
    """Words of a text in lower case without punctuation and English articles, as SQuAD and LongBench compare them."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def f1(text: str, answer: str) -> float:
    """F1 of the normalised words, with repetition."""
    ours, theirs = normalise(text), normalise(answer)
    common = (Counter(ours) & Counter(theirs)).total()
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def rouge_l(text: str, answer: str) -> float:
    """F of ROUGE-L by the package `rouge`; 0 for an answer without a word, as LongBench has it."""
    from rouge import Rouge

    try:
        return Rouge(["rouge-l"]).get_scores(text, answer)[0]["rouge-l"]["f"]
    except (ValueError, ZeroDivisionError):
        return 0.0


def edit_similarity(text: str, answer: str) -> float:
    """Similarity to the first line that is neither comment nor markup, in whole percents as LongBench takes it."""
    from rapidfuzz import fuzz

    lines = text.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(fuzz.ratio(line, answer)) / 100


def number_share(text: str, number: str) -> float:
    """Share of the numbers in an answer that are the right one."""
    numbers = re.findall(r"\d+", text)
    return numbers.count(number) / len(numbers) if numbers else 0.0


def retrieval(text: str, answer: str) -> float:
    """`number_share` of the reference's "Paragraph N"."""
    found = re.search(r"Paragraph (\d+)", answer)
    if found is None:
        raise ValueError(f"a reference of a retrieval task has no 'Paragraph N': {answer!r}")
    return number_share(text, found[1])


def classification(text: str, item: Item) -> float:
    """One over the labels that the answer names, if the right one is among them.

    A label that is part of the right one does not count; LongBench's own loop overlooks the second of two in a row.
    """
    best = 0.0
    for answer in item.answers:
        named = [label for label in item.classes or () if label in text and (label == answer or label not in answer)]
        best = max(best, 1 / len(named) if answer in named else 0.0)
    return best


def _best(metric: _ByReference) -> Metric:
    return lambda text, item: max(metric(text, answer) for answer in item.answers)


def _first_line(metric: Metric) -> Metric:
    return lambda text, item: metric(text.lstrip("\n").split("\n")[0], item)


METRICS: dict[str, Metric] = {
    "all-answers": all_answers,
    "any-answer": any_answer,
    "f1": _best(f1),
    "f1-first-line": _first_line(_best(f1)),
    "rouge-l": _best(rouge_l),
    "rouge-l-first-line": _first_line(_best(rouge_l)),
    "classification-first-line": _first_line(classification),
    "edit-similarity": _best(edit_similarity),
    "retrieval": _best(retrieval),
    "count": _best(number_share),
}


def check_metrics(items: Sequence[Item]) -> None:
    """Refuse items whose metric does not exist, before an engine starts.

    Raises
    ------
    ValueError
        Such an item.
    """
    for item in items:
        if item.answers and item.metric not in METRICS:
            raise ValueError(f"--items: {item.id} has the metric {item.metric!r}; there are {', '.join(METRICS)}")
