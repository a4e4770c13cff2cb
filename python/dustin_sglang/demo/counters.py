"""What the server counted while it answered: its Prometheus counters, before and after."""

from __future__ import annotations

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "dustin:"
_SOURCE = "selected_by_source/"


def parse_counters(page: str) -> Counter[str]:
    """Return the project's counters on a ``/metrics`` page, added up over processes.

    Names lose their prefix and the final ``_total``; a ``source`` label follows after a slash.
    """
    counts: Counter[str] = Counter()
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and sample.name.endswith("_total"):
                name = sample.name[len(PREFIX) : -len("_total")]
                source = sample.labels.get("source")
                counts[f"{name}/{source}" if source else name] += int(sample.value)
    return counts


class Counts:
    """The difference between two pages, in the terms of the demo.

    Parameters
    ----------
    before, after : Counter
        From `parse_counters`.
    """

    def __init__(self, before: Counter[str], after: Counter[str]) -> None:
        self._counts = Counter(after)
        self._counts.subtract(before)
        self.sparse_steps = self._counts["sparse_verify_steps"]

    @property
    def accept_length(self) -> float:
        """Tokens that one verification yields, bonus token included."""
        return _ratio(self._counts["accepted_tokens"], self._counts["verify_steps"])

    @property
    def mean_selected(self) -> float:
        """Positions that one sparse verification read."""
        return _ratio(self._counts["selected_positions"], self.sparse_steps)

    @property
    def mean_context(self) -> float:
        """Positions that it would have read otherwise."""
        return _ratio(self._counts["context_positions"], self.sparse_steps)

    def share(self, source: str) -> float:
        """Share of the positions read that were chosen by `source`."""
        return _ratio(self._counts[_SOURCE + source], self._counts["selected_positions"])

    @property
    def sources(self) -> list[str]:
        """What chose any positions at all; the protected ones last."""
        found = {name[len(_SOURCE) :] for name, count in self._counts.items() if name.startswith(_SOURCE) and count}
        return sorted(found, key=lambda source: (source == "protected", source != "lookahead", source))


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
