"""Counters of sparse verification, in SGLang's own Prometheus registry (``--enable-metrics``).

Everything is counted from numbers that the host has anyway; nothing is copied from the device for a metric.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dustin_sglang.selection.policies import Budget
from dustin_sglang.selection.selector import Selection


class Metrics:
    """Does nothing: the metrics of a process without ``--enable-metrics`` and of every rank but the first."""

    def verified(self, budget: Budget, selection: Selection, seq_lens: Iterable[int]) -> None:
        """A verification of one batch was launched."""

    def accepted(self, tokens: int) -> None:
        """`tokens` were accepted, bonus tokens included."""

    def radix_approximate_tokens(self, tokens: int) -> None:
        """Approximate KV of `tokens` entered the radix tree (``--dustin-radix shared``)."""


class PrometheusMetrics(Metrics):
    """Counts with prometheus_client; "request-step" is one verification of one request."""

    def __init__(self) -> None:
        # Imported here: prometheus_client decides at import whether it runs in multi-process mode, and SGLang sets
        # that up first.
        from prometheus_client import Counter

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(f"dustin:{name}", text, labels)

        self._steps = counter("verify_steps", "Request-steps verified.")
        self._sparse_steps = counter("sparse_verify_steps", "Request-steps verified over a part of the context.")
        self._selected = counter("selected_positions", "Positions listed in sparse request-steps.")
        self._context = counter("context_positions", "Committed positions of sparse request-steps.")
        self._by_source = counter(
            "selected_by_source", "Positions listed in sparse request-steps, by reason.", "source"
        )
        self._accepted = counter("accepted_tokens", "Tokens accepted, bonus tokens included.")
        self._approximate = counter("radix_approximate_tokens", "Approximate tokens that entered the radix tree.")

    def verified(self, budget: Budget, selection: Selection, seq_lens: Iterable[int]) -> None:
        self._steps.inc(len(selection.sparse))
        context = [n for n, sparse in zip(seq_lens, selection.sparse, strict=True) if sparse]
        if not context:
            return
        self._sparse_steps.inc(len(context))
        self._selected.inc(len(context) * budget.total)
        self._context.inc(sum(context))
        by_source = {"protected": budget.protected, "lookahead": budget.lookahead, budget.rest: budget.left}
        for source, count in by_source.items():
            self._by_source.labels(source).inc(len(context) * count)

    def accepted(self, tokens: int) -> None:
        self._accepted.inc(tokens)

    def radix_approximate_tokens(self, tokens: int) -> None:
        self._approximate.inc(tokens)


_metrics = Metrics()


def get() -> Metrics:
    """The metrics of this process."""
    return _metrics


def enable() -> None:
    """Count in this process from now on; once."""
    global _metrics
    if not isinstance(_metrics, PrometheusMetrics):
        _metrics = PrometheusMetrics()
