"""How much of a list the next ones keep."""

from __future__ import annotations

from collections.abc import Sequence

from dustin_sglang.explain.sources import PROTECTED, UNLISTED


def overlaps(lists: Sequence[str], reference: Sequence[int]) -> list[float | None]:
    """Share of each list's chosen positions that another list holds too.

    Protected positions are not counted as chosen: the window moves with the context, whatever the signals say.

    Parameters
    ----------
    lists
        A string a round, from `sources.sources`.
    reference
        For each round the index of the list that it is compared with.

    Returns
    -------
    list
        A share from 0 to 1; None for a round compared with itself, or with nothing chosen.
    """
    result: list[float | None] = []
    for index, (marks, other) in enumerate(zip(lists, reference, strict=True)):
        chosen = [position for position, mark in enumerate(marks) if mark not in (UNLISTED, PROTECTED)]
        if index == other or not chosen:
            result.append(None)
            continue
        kept = sum(position < len(lists[other]) and lists[other][position] != UNLISTED for position in chosen)
        result.append(kept / len(chosen))
    return result


def with_previous(lists: Sequence[str]) -> list[float | None]:
    """Overlap of each list with the one before it."""
    return overlaps(lists, [max(index - 1, 0) for index in range(len(lists))])


def with_first(lists: Sequence[str]) -> list[float | None]:
    """Overlap of each list with the first one."""
    return overlaps(lists, [0] * len(lists))
