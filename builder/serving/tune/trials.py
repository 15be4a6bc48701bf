"""Run one trial: a copy of the model with other settings, on the embedded server, under load."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.repository.settings import Settings, with_settings
from builder.serving.load.measure import load_test
from builder.serving.load.record import LoadMeasurement
from builder.serving.load.traffic import Level, Target
from builder.serving.server.triton import running


@dataclass(frozen=True)
class Conditions:
    """Conditions of every trial: `levels` in order, each `seconds` long, until p99 exceeds `p99_ms`."""

    samples: Sequence[Mapping[str, Any]]
    levels: tuple[Level, ...]
    seconds: float
    p99_ms: float


@dataclass(frozen=True)
class TrialOutcome:
    """The best level within the limit, or the nearest if none is. `score`: more is better, below 0 beyond the limit."""

    level: Level
    throughput: float
    p99_ms: float
    score: float


def throughput(load: LoadMeasurement) -> float:
    """Return the maximised quantity: answers per second, or tokens per second of streams."""
    return load.client.requests_per_s if load.client.stream is None else load.client.stream.tokens_per_s


def best_outcome(loads: Sequence[LoadMeasurement], limit_ms: float) -> TrialOutcome:
    """Return the outcome with the most throughput within the limit; the one with the least p99 if none is within."""
    within = [load for load in loads if load.client.bounded_ms <= limit_ms]
    if within:
        best = max(within, key=throughput)
        return TrialOutcome(best.level, throughput(best), best.client.bounded_ms, throughput(best))
    least = min(loads, key=lambda load: load.client.bounded_ms)
    return TrialOutcome(least.level, throughput(least), least.client.bounded_ms, -least.client.bounded_ms)


def measure_settings(version: Path, settings: Settings | None, conditions: Conditions) -> TrialOutcome:
    """Measure all levels under `settings`; None: as it was published. Raises ServeError."""
    with serve_copy(version, settings) as url:
        target = Target(version.parent.name, conditions.samples)
        run = load_test(url, [target], conditions.levels, 1, conditions.seconds, conditions.p99_ms)
    return best_outcome(run.loads, conditions.p99_ms)


def measure_again(version: Path, settings: Settings | None, conditions: Conditions, level: Level) -> LoadMeasurement:
    """Measure one level again."""
    with serve_copy(version, settings) as url:
        target = Target(version.parent.name, conditions.samples)
        (load,) = load_test(url, [target], [level], 1, conditions.seconds).loads
    return load


@contextlib.contextmanager
def serve_copy(version: Path, settings: Settings | None) -> Iterator[str]:
    """Serve a copy of the model under `settings` and yield the server's address. The model itself is only read."""
    changed = {} if settings is None else with_settings(version, settings)
    with tempfile.TemporaryDirectory(prefix="build-repo-tune-") as folder:
        model = Path(folder) / "model_repository" / version.parent.name
        shutil.copytree(version.parent, model, copy_function=_link)
        for name, content in changed.items():
            (model / name).unlink()  # a link, whose target must not change
            (model / name).write_bytes(content)
        with running(model.parent) as server:
            yield server.url


def _link(source: str, target: str) -> None:
    """Create a hard link, or a copy if the file system does not support links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
