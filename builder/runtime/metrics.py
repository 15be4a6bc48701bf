"""Publish a model's metrics on Triton's /metrics. Each value is a message to the server: only changes are sent."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # provided by Triton

Family = tuple[str, str, str]
"""A name, COUNTER or GAUGE, and a description."""


class Metrics:
    """Metrics of `model` in `version`: build_repo_NAME for a gauge, build_repo_NAME_total for a counter."""

    def __init__(self, families: Sequence[Family], model: str, version: str) -> None:
        self.kinds = {name: kind for name, kind, _ in families}
        self.families = {  # keeps references: a metric is removed with its family
            name: pb_utils.MetricFamily(
                name=f"build_repo_{name}" + ("_total" if kind == "COUNTER" else ""),
                description=description,
                kind=getattr(pb_utils.MetricFamily, kind),
            )
            for name, kind, description in families
        }
        # labelled by version: Triton removes metrics with the same labels of two processes when either process ends
        labels = {"model": model, "version": version}
        self.metrics = {name: family.Metric(labels=labels) for name, family in self.families.items()}
        self.sent = dict.fromkeys(self.kinds, 0.0)  # initial values in Triton
        self.due_at = 0.0

    def due(self) -> bool:
        """Return True if values are to be published now: once a second."""
        now = time.monotonic()
        if now < self.due_at:
            return False
        self.due_at = now + 1
        return True

    def publish(self, values: Mapping[str, float]) -> None:
        """Send those of `values` that changed, by the names of their families; a counter's value is its sum so far."""
        for name, value in values.items():
            change = value - self.sent[name]
            if self.kinds[name] == "GAUGE" and change:
                self.metrics[name].set(value)
            elif change > 0:
                self.metrics[name].increment(change)
            self.sent[name] = value
