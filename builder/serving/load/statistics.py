"""Compute from Triton's counters, between two moments, the queue and compute times and the batches.

Fields: triton-inference-server/server, docs/protocol/extension_statistics.md; counts, and nanoseconds since the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NANOSECONDS = 1e6  # in a millisecond
COMPUTE = ("compute_input", "compute_infer", "compute_output")

Statistics = Mapping[str, Any]  # of one model: an entry of `model_stats`


@dataclass(frozen=True)
class ServerFigures:
    """Server's work for one model. Times are the mean of a request, in milliseconds."""

    queue_ms: float
    compute_ms: float
    mean_batch: float
    batches: Mapping[str, int]  # size of a batch, as a JSON key -> number of executions
    failures: int


def statistics_between(before: Statistics, after: Statistics) -> ServerFigures:
    """Return the difference of two statistics of the same model."""
    requests = _grown(before, after, "inference_stats", "success", "count")
    queue = _grown(before, after, "inference_stats", "queue", "ns")
    compute = sum(_grown(before, after, "inference_stats", part, "ns") for part in COMPUTE)
    executions = _grown(before, after, "execution_count")
    rows = _grown(before, after, "inference_count")
    counted, had = _batches(after), _batches(before)
    batches = {str(size): count - had.get(size, 0) for size, count in sorted(counted.items())}
    return ServerFigures(
        queue_ms=queue / max(requests, 1) / NANOSECONDS,
        compute_ms=compute / max(requests, 1) / NANOSECONDS,
        mean_batch=rows / max(executions, 1),
        batches={size: count for size, count in batches.items() if count > 0},
        failures=_grown(before, after, "inference_stats", "fail", "count"),
    )


def _grown(before: Statistics, after: Statistics, *path: str) -> int:
    return _count(after, *path) - _count(before, *path)


def _count(statistics: Any, *path: str) -> int:
    """Return a counter at `path`: protobuf's JSON omits 0, and writes 64-bit numbers as strings."""
    for name in path:
        statistics = statistics.get(name, {} if name != path[-1] else 0)
    return int(statistics)


def _batches(statistics: Statistics) -> dict[int, int]:
    return {
        int(entry["batch_size"]): _count(entry, "compute_infer", "count") for entry in statistics.get("batch_stats", ())
    }
