"""Read the figures of a load test: those of the clients from perf_analyzer, those of the server from Triton's counters.

perf_analyzer writes a CSV for single answers and, for streams, a JSON of every response, with times in nanoseconds
since 1970: triton-inference-server/perf_analyzer, src/profile_data_exporter.cc. Triton has counts, and nanoseconds
since its start: triton-inference-server/server, docs/protocol/extension_statistics.md.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from builder.common.errors import ServeError

MICROSECONDS = 1e3  # in a millisecond; the CSV has microseconds
NANOSECONDS = 1e6  # in a millisecond
COMPUTE = ("compute_input", "compute_infer", "compute_output")

Statistics = Mapping[str, Any]  # of one model: an entry of `model_stats`


@dataclass(frozen=True)
class StreamLatency:
    """Figures of a stream: milliseconds to the first token and between tokens, and tokens a second."""

    first_p50_ms: float
    first_p99_ms: float
    between_p50_ms: float
    between_p99_ms: float
    tokens_per_s: float


@dataclass(frozen=True)
class ClientFigures:
    """Figures of the clients: answers a second, and the milliseconds until an answer was complete."""

    requests_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    stream: StreamLatency | None = None

    @property
    def bounded_ms(self) -> float:
        """p99 to which a limit applies, in ms: of the whole answer or, for a stream, of its first token."""
        return self.p99_ms if self.stream is None else self.stream.first_p99_ms


def from_csv(text: str) -> ClientFigures:
    """Read the last line of a report by `perf_analyzer -f`, with the percentiles 50, 90 and 99."""
    *_, row = csv.DictReader(text.splitlines())
    p50, p90, p99 = (float(row[f"p{percentile} latency"]) / MICROSECONDS for percentile in (50, 90, 99))
    return ClientFigures(float(row["Inferences/Second"]), p50, p90, p99)


def from_export(document: Mapping[str, Any]) -> ClientFigures:
    """Compute the figures of a `--profile-export-file` from the requests whose last response is within its windows.

    Raises ServeError if there is no such request.
    """
    (experiment,) = document["experiments"]
    start, end = experiment["window_boundaries"][0], experiment["window_boundaries"][-1]
    answered = [request for request in experiment["requests"] if request["response_timestamps"]]
    ended = [request for request in answered if start <= request["response_timestamps"][-1] <= end]
    if not ended:
        raise ServeError("no stream ended while perf_analyzer measured: measure for longer (--seconds)")
    seconds = (end - start) / 1e9
    whole = [r["response_timestamps"][-1] - r["timestamp"] for r in ended]
    first = [r["response_timestamps"][0] - r["timestamp"] for r in ended]
    gaps = [after - before for r in ended for before, after in pairwise(r["response_timestamps"])]
    p50, p90, p99 = np.percentile(whole, (50, 90, 99)) / NANOSECONDS
    first_p50, first_p99 = np.percentile(first, (50, 99)) / NANOSECONDS
    between_p50, between_p99 = np.percentile(gaps or [0], (50, 99)) / NANOSECONDS
    tokens = sum(_tokens(r["response_outputs"]) for r in ended)
    stream = StreamLatency(float(first_p50), float(first_p99), float(between_p50), float(between_p99), tokens / seconds)
    return ClientFigures(len(ended) / seconds, float(p50), float(p90), float(p99), stream)


def _tokens(outputs: Sequence[Mapping[str, Any]]) -> int:
    """Return the tokens of an answer, as its last response counts them; without a count, one for each response."""
    counted = [output["completion_tokens"] for output in outputs if output.get("completion_tokens") not in (None, "")]
    if not counted:
        return len(outputs)
    last = counted[-1]
    return int(sum(last) if isinstance(last, list) else last)


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
