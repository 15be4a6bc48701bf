"""Load tests with the real perf_analyzer, on inputs that fit the task and are of mixed lengths.

Knows perf_analyzer's files; a load is a list of samples.
"""

from __future__ import annotations

import csv
import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from builder.errors import ServeError
from builder.runtime.fields import Field
from builder.serve.client import Client
from builder.serve.perf_analyzer import find_perf_analyzer

if TYPE_CHECKING:
    from builder.tasks.base import Sample

MILLISECOND = 1000.0  # perf_analyzer writes microseconds


@dataclass(frozen=True)
class Load:
    """One concurrency: throughput, client latencies, and how Triton batched."""

    concurrency: int
    requests_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    mean_batch: float
    failures: int


def load_test(
    url: str, name: str, samples: Sequence[Sample], concurrencies: Sequence[int], window_ms: int = 4000
) -> list[Load]:
    """Drive the model `name` at `url` with `samples`, in turn, at each concurrency.

    Each measurement is the mean of three windows of `window_ms`, after perf_analyzer's own warm-up.
    Raises ServeError when the load cannot run.
    """
    program, environment = find_perf_analyzer()
    with Client(url, name) as client, tempfile.TemporaryDirectory() as place:
        data = Path(place) / "input.json"
        data.write_text(json.dumps(_input_data(samples, client.signature.inputs)), "utf-8")
        return [_measure(program, environment, client, data, concurrency, window_ms) for concurrency in concurrencies]


def _measure(
    program: Path, environment: dict[str, str], client: Client, data: Path, concurrency: int, window_ms: int
) -> Load:
    report = data.with_name(f"report-{concurrency}.csv")
    command = [str(program), "-m", client.name, "-u", client.url, "-i", "grpc"]
    command += ["--input-data", str(data), "--concurrency-range", str(concurrency)]
    command += ["--measurement-interval", str(window_ms), "--stability-percentage", "999"]
    command += ["--percentile", "50", "-f", str(report)]
    command += ["--streaming"] if client.signature.streams else []
    before = client.statistics()
    limit_s = 60 + 20 * window_ms / 1000
    try:
        finished = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired as error:
        raise ServeError(
            f"perf_analyzer did not end within {limit_s:.0f} s at concurrency {concurrency}. Ask {client.name} "
            "something with build-repo query; a model with response_cache makes perf_analyzer 2.51 hang: test without"
        ) from error
    after = client.statistics()
    if not report.is_file():
        lines = [line for line in (finished.stdout + finished.stderr).splitlines() if line.strip()]
        raise ServeError(f"perf_analyzer measured nothing: {lines[-1] if lines else 'it said nothing'}")
    row = next(csv.DictReader(report.read_text().splitlines()))
    executions = after["execution_count"] - before["execution_count"]
    inferences = after["inference_count"] - before["inference_count"]
    return Load(
        concurrency=concurrency,
        requests_per_s=float(row["Inferences/Second"]),
        p50_ms=float(row["p50 latency"]) / MILLISECOND,
        p90_ms=float(row["p90 latency"]) / MILLISECOND,
        p99_ms=float(row["p99 latency"]) / MILLISECOND,
        mean_batch=inferences / max(executions, 1),
        failures=after["failures"] - before["failures"],
    )


def _input_data(samples: Sequence[Sample], fields: Sequence[Field]) -> dict[str, Any]:
    """perf_analyzer's JSON: each sample's inputs with their shapes; only inputs that every sample has."""
    common = [field for field in fields if all(field.name in sample for sample in samples)]
    entries = []
    for sample in samples:
        entry = {}
        for field in common:
            value = sample[field.name]
            content = list(value) if isinstance(value, (list, tuple)) else [value]
            entry[field.name] = {"content": content, "shape": [len(content)]}
        entries.append(entry)
    return {"data": entries}


def load_table(name: str, loads: Sequence[Load]) -> Table:
    """One row a concurrency."""
    table = Table(title=f"load on {name}, perf_analyzer over gRPC", title_justify="left")
    for column in ("concurrency", "requests/s", "p50 ms", "p90 ms", "p99 ms", "mean batch", "failures"):
        table.add_column(column, justify="right")
    for load in loads:
        table.add_row(*(f"{value:.1f}" if isinstance(value, float) else str(value) for value in asdict(load).values()))
    return table
