"""Metrics on Triton's /metrics, with a stand-in for its module; only changes are published."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from builder.runtime.encoder import pipeline
from builder.runtime.generation import stats
from builder.runtime.shared import host

TRITON, METRICS = "triton_python_backend_utils", "builder.runtime.adapters"


class Family:
    """Fake MetricFamily of one metric that records the updates."""

    COUNTER, GAUGE = "counter", "gauge"
    messages: list[tuple[str, str, float]]

    def __init__(self, name: str, description: str, kind: str) -> None:
        self.name, self.kind = name, kind

    def Metric(self, labels: dict[str, str]) -> Family:  # Triton's name
        assert labels == {"model": "m", "version": "3"}
        return self

    def set(self, value: float) -> None:
        self.messages.append((self.name, "set", value))

    def increment(self, value: float) -> None:
        self.messages.append((self.name, "increment", value))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    triton = ModuleType(TRITON)
    monkeypatch.setattr(Family, "messages", [], raising=False)
    monkeypatch.setattr(triton, "MetricFamily", Family, raising=False)
    monkeypatch.setitem(sys.modules, TRITON, triton)
    sys.modules.pop(METRICS, None)
    yield importlib.import_module(METRICS)
    sys.modules.pop(METRICS, None)


def test_metrics_publish_only_changes(module: Any) -> None:
    metrics = module.Metrics((("steps", "COUNTER", "Steps"), ("running", "GAUGE", "Runs")), "m", "3")
    metrics.publish({"steps": 2, "running": 4})
    metrics.publish({"steps": 2, "running": 4})
    metrics.publish({"steps": 5})
    metrics.publish({"running": 0})
    assert Family.messages == [
        ("build_repo_steps_total", "increment", 2),
        ("build_repo_running", "set", 4),
        ("build_repo_steps_total", "increment", 3),
        ("build_repo_running", "set", 0),
    ]


def test_every_family_of_a_model_has_a_value() -> None:
    """A family without a value would be documented, and published as 0."""
    load_time = {"loaded_timestamp_seconds"}  # encoder_model.py publishes it
    assert pipeline.Counts().values().keys() | load_time == {name for name, _, _ in pipeline.FAMILIES}
    assert stats.Stats().values().keys() == {name for name, _, _ in stats.FAMILIES}
    shared = host.Host(cast(host.Listing, SimpleNamespace(models={})), 0, cast(Any, None), lambda: 0, lambda: None)
    assert shared.values().keys() == {name for name, _, _ in host.FAMILIES}


def test_metrics_are_due_once_a_second(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    metrics = module.Metrics((), "m", "3")
    assert [metrics.due(), metrics.due()] == [True, False]
    now[0] += 1
    assert metrics.due()
