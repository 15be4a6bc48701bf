"""What a shared front says of itself on Triton's /metrics, once a second: each value is a message to the server."""

from __future__ import annotations

import time

import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]  # provided by Triton

from ..encoder.waiting import Waiting
from .host import Host

FAMILIES = (
    ("shared_hosted", "GAUGE", "Models that a shared front answers for"),
    ("shared_loaded", "GAUGE", "Of them, models in memory"),
    ("shared_resident_bytes", "GAUGE", "Memory of its process"),
    ("shared_loads", "COUNTER", "Models loaded"),
    ("shared_load_seconds", "COUNTER", "Time that loading took"),
    ("shared_evictions", "COUNTER", "Models that made room for others"),
    ("refused", "COUNTER", "Requests that were refused because too many waited, or for too long"),
    ("waited_seconds", "COUNTER", "Time that requests waited in the front, after Triton's own queue"),
)


class Metrics:
    """Of the shared front `model` in `version`."""

    def __init__(self, model: str, version: str) -> None:
        self.families = {  # kept: a metric dies with its family
            name: pb_utils.MetricFamily(
                name=f"build_repo_{name}" + ("_total" if kind == "COUNTER" else ""),
                description=description,
                kind=getattr(pb_utils.MetricFamily, kind),
            )
            for name, kind, description in FAMILIES
        }
        labels = {"model": model, "version": version}
        self.metrics = {name: family.Metric(labels=labels) for name, family in self.families.items()}
        self.sent: dict[str, float] = {}
        self.sent_at = 0.0

    def publish(self, host: Host, waiting: Waiting) -> None:
        """Say what changed since the last time."""
        if time.monotonic() - self.sent_at < 1:
            return
        now = {
            "shared_hosted": len(host.listing.models),
            "shared_loaded": len(host.loaded),
            "shared_resident_bytes": host.resident(),
            "shared_loads": host.tally.loads,
            "shared_load_seconds": host.tally.load_seconds,
            "shared_evictions": host.tally.evictions,
            "refused": waiting.refused,
            "waited_seconds": waiting.waited_s,
        }
        for name, kind, _ in FAMILIES:
            before = self.sent.get(name, 0)
            if kind == "GAUGE" and now[name] != before:
                self.metrics[name].set(now[name])
            elif kind == "COUNTER" and now[name] > before:
                self.metrics[name].increment(now[name] - before)
        self.sent, self.sent_at = now, time.monotonic()
