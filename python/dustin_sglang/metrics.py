"""Counters of sparse verification, in SGLang's own Prometheus registry (``--enable-metrics``).

Everything is counted from numbers that the host has anyway, with one exception: how many positions are listed where
lists end by mass. That is copied behind a verification and counted at the next one, so that nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dustin_sglang.devices import to_host
from dustin_sglang.selection.policies import Budget
from dustin_sglang.selection.selector import Selection


class Metrics:
    """Does nothing: the metrics of a process without ``--enable-metrics`` and of every rank but the first."""

    def verified(self, budget: Budget, selection: Selection, seq_lens: Sequence[int], exact: int) -> None:
        """A verification of one batch was launched; `exact` of its committed tokens have exact KV."""

    def accepted(self, tokens: int) -> None:
        """`tokens` were accepted, bonus tokens included."""

    def rectified(self, requests: int, tokens: int) -> None:
        """One dense pass rewrote the KV of `tokens` of so many requests."""

    def monitored(self, agreeing: float, compared: float, kl: float, shares: Mapping[str, float]) -> None:
        """One request was also verified densely; `kl` in nats, summed over tokens; `shares` from 0 to 1."""

    def fell_back(self) -> None:
        """A request is verified densely from now on."""

    def radix_approximate_tokens(self, tokens: int) -> None:
        """Approximate KV of `tokens` entered the radix tree (``--dustin-radix shared``)."""


@dataclass(frozen=True)
class _Late:
    """Counts of lists on their way to the host: int64 ``[batch]``, and the event behind the copy, None on the CPU."""

    budget: Budget
    sparse: list[bool]
    host: torch.Tensor
    copied: Any


class PrometheusMetrics(Metrics):
    """Counts with prometheus_client; "request-step" is one verification of one request."""

    def __init__(self) -> None:
        # Imported here: prometheus_client decides at import whether it runs in multi-process mode, and SGLang sets
        # that up first.
        from prometheus_client import Counter, Gauge

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(f"dustin:{name}", text, labels)

        def gauge(name: str, text: str) -> Any:
            return Gauge(f"dustin:{name}", text, multiprocess_mode="mostrecent")

        self._late: _Late | None = None
        self._budget = gauge("budget_positions", "Positions that one list may hold.")
        self._exact = gauge("exact_tokens", "Committed tokens with exact KV, of the last batch verified.")
        self._inexact = gauge("approximate_tokens", "Committed tokens with approximate KV, of the last batch verified.")
        self._steps = counter("verify_steps", "Request-steps verified.")
        self._sparse_steps = counter("sparse_verify_steps", "Request-steps verified over a part of the context.")
        self._selected = counter("selected_positions", "Positions listed in sparse request-steps.")
        self._context = counter("context_positions", "Committed positions of sparse request-steps.")
        self._by_source = counter(
            "selected_by_source",
            "Positions listed in sparse request-steps, by reason; of summed signals by what each counts for.",
            "source",
        )
        self._accepted = counter("accepted_tokens", "Tokens accepted, bonus tokens included.")
        self._rectifications = counter("rectifications", "Times that a request's approximate KV was rewritten.")
        self._rectified = counter("rectified_tokens", "Tokens whose approximate KV was rewritten.")
        self._monitored = counter("monitored_request_steps", "Sparse request-steps that were also run densely.")
        self._compared = counter("compared_tokens", "Tokens of monitored request-steps.")
        self._agreeing = counter("agreeing_tokens", "Compared tokens whose greedy choice was the dense one.")
        self._kl = counter("compared_kl_nats", "KL of the dense to the sparse distribution, summed over tokens.")
        self._captured = counter("captured_mass", "Share of a signal's mass on listed positions, summed.", "signal")
        self._overlap = counter("signal_overlap", "Share of positions that both signals prefer, summed.")
        self._fallbacks = counter("dense_fallbacks", "Requests that turned to dense verification.")
        self._approximate = counter("radix_approximate_tokens", "Approximate tokens that entered the radix tree.")

    def verified(self, budget: Budget, selection: Selection, seq_lens: Sequence[int], exact: int) -> None:
        self._collect()
        self._budget.set(budget.total)
        self._exact.set(exact)
        self._inexact.set(sum(seq_lens) - exact)
        self._steps.inc(len(selection.sparse))
        context = [n for n, sparse in zip(seq_lens, selection.sparse, strict=True) if sparse]
        if not context:
            return
        self._sparse_steps.inc(len(context))
        self._context.inc(sum(context))
        if selection.kept is not None:
            self._late = _Late(budget, selection.sparse, *to_host(selection.kept))
            return
        self._count_sources({source: len(context) * count for source, count in budget.by_source.items()})

    def _count_sources(self, by_source: Mapping[str, int]) -> None:
        self._selected.inc(sum(by_source.values()))
        for source, count in by_source.items():
            self._by_source.labels(source).inc(count)

    def _collect(self) -> None:
        """Count what the verification before listed by mass; the host has waited for its committed lengths since."""
        late, self._late = self._late, None
        if late is None:
            return
        if late.copied is not None:
            late.copied.synchronize()
        counts = [n for n, sparse in zip(late.host.tolist(), late.sparse, strict=True) if sparse]
        protected = len(counts) * late.budget.protected
        self._count_sources({"protected": protected, "mass": sum(counts) - protected})

    def accepted(self, tokens: int) -> None:
        self._accepted.inc(tokens)

    def rectified(self, requests: int, tokens: int) -> None:
        self._rectifications.inc(requests)
        self._rectified.inc(tokens)

    def monitored(self, agreeing: float, compared: float, kl: float, shares: Mapping[str, float]) -> None:
        self._monitored.inc()
        self._compared.inc(compared)
        self._agreeing.inc(agreeing)
        self._kl.inc(max(kl, 0.0))  # rounding may leave it a little below 0
        for name, value in shares.items():
            (self._overlap if name == "overlap" else self._captured.labels(name)).inc(value)

    def fell_back(self) -> None:
        self._fallbacks.inc()

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
