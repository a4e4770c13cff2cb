"""The Grafana dashboard shows every metric of the project, and asks for none that does not exist."""

from __future__ import annotations

import json
import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import prometheus_client
import pytest

from dustin_sglang import metrics

DASHBOARD = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())


def asked_for(prefix: str) -> set[str]:
    queries = " ".join(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"])
    return set(re.findall(rf"{prefix}:[a-z_]+", queries))


def test_every_metric_of_the_project_is_shown_and_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = prometheus_client.CollectorRegistry()
    for kind in ("Counter", "Gauge"):
        monkeypatch.setattr(prometheus_client, kind, partial(getattr(prometheus_client, kind), registry=registry))
    metrics.PrometheusMetrics()
    families = registry.collect()
    assert asked_for("dustin") == {f.name + ("_total" if f.type == "counter" else "") for f in families}


def test_sglang_has_what_the_dashboard_asks_it_for() -> None:
    spec = find_spec("sglang.srt.observability.metrics_collector")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).read_text()
    asked = asked_for("sglang")
    assert asked and all(f'"{name}"' in source for name in asked), asked
