"""Save a load test: every repeat of every level, kept as JSON, and its figures with their noise."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from builder.common.errors import SpecError
from builder.common.files import write_output
from builder.serving.load.figures import ClientFigures, ServerFigures, StreamLatency
from builder.serving.load.noise import Estimate
from builder.serving.load.traffic import Level

PERF_ANALYZER, AIPERF = "perf_analyzer over gRPC", "AIPerf over the gateway"
SCHEMA = 1  # incremented when a field changes its name, its type or its meaning


@dataclass(frozen=True)
class LoadMeasurement:
    """One repeat: the model under its share of `level`, as clients saw it and as Triton counted it.

    `program`: the load generator, and what it sends to.
    """

    model: str
    level: Level
    client: ClientFigures
    server: ServerFigures
    program: str = PERF_ANALYZER


@dataclass(frozen=True)
class LoadTestRun:
    """Load test. `server`: its name and version; `machine`: where the clients ran; `stopped`: why a ramp ended."""

    when: str
    server: str
    machine: dict[str, Any]
    seconds: float
    loads: tuple[LoadMeasurement, ...]
    stopped: str | None = None

    def repeats(self) -> dict[tuple[str, Level], list[LoadMeasurement]]:
        """Group the repeats by model and level, in the order in which they were first measured."""
        groups: dict[tuple[str, Level], list[LoadMeasurement]] = {}
        for load in self.loads:
            groups.setdefault((load.model, load.level), []).append(load)
        return groups

    @property
    def programs(self) -> str:
        """Load generators that measured, in words."""
        return " and ".join(dict.fromkeys(load.program for load in self.loads))

    def document(self) -> dict[str, Any]:
        """Return the run as JSON values."""
        return {"schema": SCHEMA, **asdict(self)}


@dataclass(frozen=True)
class Figure:
    """One number of a measurement, which may lack it. `higher`: True if more is better; None if neither is."""

    title: str
    of: Callable[[LoadMeasurement], float | None]
    higher: bool | None = False


def _stream(name: str) -> Callable[[LoadMeasurement], float | None]:
    return lambda load: None if load.client.stream is None else getattr(load.client.stream, name)


FIGURES = (
    Figure("requests/s", lambda load: load.client.requests_per_s, higher=True),
    Figure("p50 ms", lambda load: load.client.p50_ms),
    Figure("p90 ms", lambda load: load.client.p90_ms),
    Figure("p99 ms", lambda load: load.client.p99_ms),
    Figure("first token p50 ms", _stream("first_p50_ms")),
    Figure("first token p99 ms", _stream("first_p99_ms")),
    Figure("between tokens p50 ms", _stream("between_p50_ms")),
    Figure("between tokens p99 ms", _stream("between_p99_ms")),
    Figure("tokens/s", _stream("tokens_per_s"), higher=True),
    Figure("queue ms", lambda load: None if load.client.stream else load.server.queue_ms),
    Figure("compute ms", lambda load: None if load.client.stream else load.server.compute_ms),
    Figure("mean batch", lambda load: None if load.client.stream else load.server.mean_batch, higher=None),
    Figure("failures", lambda load: float(load.server.failures)),
)


def estimate(figure: Figure, loads: Sequence[LoadMeasurement]) -> Estimate | None:
    """Return the mean of a figure over the repeats of one level, with its noise; None if they lack it."""
    values = [value for value in map(figure.of, loads) if value is not None]
    return Estimate.of(values) if values else None


def table(run: LoadTestRun) -> Table:
    """Return a table: a row for each model and level, a column for each figure, intervals if levels were repeated."""
    groups = run.repeats()
    shown = [figure for figure in FIGURES if any(figure.of(load) is not None for load in run.loads)]
    shown = [
        figure for figure in shown if figure.title != "failures" or any(load.server.failures for load in run.loads)
    ]
    count = max(map(len, groups.values()))
    title = f"{count} x {run.seconds:g} s a level, {run.programs}, {run.server}"
    result = Table(title=title, title_justify="left")
    result.add_column("model", no_wrap=True)
    for name in ("load", *(figure.title for figure in shown)):
        result.add_column(name, justify="right")
    for (model, level), loads in groups.items():
        values = [estimate(figure, loads) for figure in shown]
        result.add_row(model, str(level), *("-" if value is None else str(value) for value in values))
    if count > 1:
        result.caption, result.caption_justify = "±: 95% interval of the mean over the repeats", "left"
    return result


def save(run: LoadTestRun, path: Path) -> None:
    """Save a run as JSON. Raises RepositoryError if the file cannot be written."""
    write_output(path, json.dumps(run.document(), indent=1), "choose another file")


def read(path: Path) -> LoadTestRun:
    """Read a run from a file that `save` wrote. Raises SpecError if it is not one."""
    try:
        document = json.loads(path.read_text("utf-8"))
        schema = document.pop("schema")
        if schema != SCHEMA:
            raise SpecError(f"{path} has schema {schema} and this version reads {SCHEMA}: measure again")
        return LoadTestRun(**{**document, "loads": tuple(map(_load, document["loads"]))})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SpecError(f"{path} is not a load test that was saved with --save ({error!r})") from error


def _load(document: dict[str, Any]) -> LoadMeasurement:
    client = document["client"]
    stream = None if client["stream"] is None else StreamLatency(**client["stream"])
    return LoadMeasurement(
        document["model"],
        Level(**document["level"]),
        ClientFigures(**{**client, "stream": stream}),
        ServerFigures(**document["server"]),
        document.get("program", PERF_ANALYZER),
    )
