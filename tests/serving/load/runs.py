"""Load tests with invented measurements."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console

from builder.serving.load.figures import ClientFigures, ServerFigures, StreamLatency
from builder.serving.load.record import LoadMeasurement, LoadTestRun
from builder.serving.load.traffic import Level

SERVED = ServerFigures(queue_ms=2.0, compute_ms=6.0, mean_batch=3.5, batches={"1": 4, "2": 3, "3": 3}, failures=0)


def run_of(*loads: LoadMeasurement) -> LoadTestRun:
    return LoadTestRun(
        "2026-11-22T12:00:00+00:00", "triton 2.51.0", {"model": "a CPU", "flags": [], "cores": 2}, 6.0, loads
    )


def encoder(level: Level, rates: Sequence[float], model: str = "topics", p99_ms: float = 20.0) -> list[LoadMeasurement]:
    """Return one repeat for each rate of answers."""
    return [
        LoadMeasurement(model, level, ClientFigures(rate, 1000 / rate, 1500 / rate, p99_ms), SERVED) for rate in rates
    ]


def stream(level: Level, tokens: Sequence[float], model: str = "writes") -> list[LoadMeasurement]:
    """Return one repeat for each rate of tokens."""
    return [
        LoadMeasurement(
            model,
            level,
            ClientFigures(rate / 32, 320.0, 330.0, 340.0, StreamLatency(20.0, 25.0, 9.0, 12.0, rate)),
            SERVED,
        )
        for rate in tokens
    ]


def shown(thing: object) -> str:
    console = Console(width=240, file=io.StringIO(), record=True)
    console.print(thing)
    return console.export_text()
