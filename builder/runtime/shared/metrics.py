"""Define the metrics of a shared front, which Triton publishes on /metrics."""

from __future__ import annotations

from ..encoder.request_queue import FAMILIES as QUEUE_FAMILIES
from ..encoder.request_queue import RequestQueue
from .host import Host

FAMILIES = (
    ("shared_hosted", "GAUGE", "Models that a shared front answers for"),
    ("shared_loaded", "GAUGE", "Of them, models in memory"),
    ("shared_resident_bytes", "GAUGE", "Memory of its process"),
    ("shared_loads", "COUNTER", "Models loaded"),
    ("shared_load_seconds", "COUNTER", "Time that loading took"),
    ("shared_evictions", "COUNTER", "Models that made room for others"),
    *QUEUE_FAMILIES,
)


def values(host: Host, waiting: RequestQueue) -> dict[str, float]:
    """Return the current value of each family."""
    return {
        "shared_hosted": len(host.listing.models),
        "shared_loaded": len(host.loaded),
        "shared_resident_bytes": host.resident(),
        "shared_loads": host.counters.loads,
        "shared_load_seconds": host.counters.load_seconds,
        "shared_evictions": host.counters.evictions,
        **waiting.values(),
    }
