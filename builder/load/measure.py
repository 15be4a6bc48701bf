"""Load tests with the real perf_analyzer, on inputs that fit the task and are of mixed lengths.

Knows perf_analyzer's command line and files; what it drives is a list of targets, what it leaves is a Run.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from builder.engines.cpu import cpu
from builder.errors import ServeError
from builder.load.profile import Seen, from_csv, from_export
from builder.load.record import Load, Run
from builder.load.statistics import between
from builder.load.traffic import Level, Target
from builder.machine import available_cores
from builder.runtime.fields import Field
from builder.serve.client import Client
from builder.serve.perf_analyzer import find_perf_analyzer

WINDOWS = 3  # perf_analyzer measures so many at least, one after the other
SLOWEST = 20.0  # times what a measurement should take: then it hangs


def load_test(
    url: str,
    targets: Sequence[Target],
    levels: Sequence[Level],
    repeats: int = 3,
    seconds: float = 6.0,
    p99_ms: float | None = None,
) -> Run:
    """Drive the models `targets` at `url` together, at each of `levels`, `repeats` times for `seconds` each.

    A ramp ends after the first level whose p99 exceeds `p99_ms`, of any of the models, or that the server refuses.
    Raises ServeError when the first level cannot run.
    """
    loads: list[Load] = []
    stopped = None
    for level in levels:
        try:
            measured = [load for _ in range(repeats) for load in measure(url, targets, level, seconds)]
        except ServeError as error:
            if not loads:
                raise
            stopped = f"{level}: {error}"
            break
        loads += measured
        over = [load for load in measured if p99_ms is not None and load.client.p99_ms > p99_ms]
        if 2 * len(over) > len(measured):
            stopped = f"{level}: p99 of {over[0].model} is {over[0].client.p99_ms:.0f} ms, more than {p99_ms:g} ms"
            break
    with Client(url, targets[0].name) as client:
        server = client.server()
    machine = {**cpu(), "cores": available_cores()}
    return Run(datetime.now(UTC).isoformat(timespec="seconds"), server, machine, seconds, tuple(loads), stopped)


def measure(url: str, targets: Sequence[Target], level: Level, seconds: float) -> list[Load]:
    """All `targets` at once, once, for `seconds` after perf_analyzer's own warm-up; one Load a target.

    Raises ServeError when the load cannot run.
    """
    program, environment = find_perf_analyzer()
    with contextlib.ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clients = [stack.enter_context(Client(url, target.name)) for target in targets]
        before = [client.statistics() for client in clients]
        with ThreadPoolExecutor(len(targets)) as pool:
            runs = [
                pool.submit(
                    _drive,
                    [str(program), *_command(client, target.samples, level.part(target.share), seconds, place)],
                    environment,
                    client,
                    place,
                    SLOWEST * seconds + 60,
                )
                for client, target in zip(clients, targets, strict=True)
            ]
            seen = [run.result() for run in runs]
        served = [between(was, client.statistics()) for was, client in zip(before, clients, strict=True)]
    return [Load(t.name, level, *both) for t, *both in zip(targets, seen, served, strict=True)]


def _command(
    client: Client, samples: Sequence[Mapping[str, Any]], level: Level, seconds: float, place: Path
) -> list[str]:
    """The options of perf_analyzer, and its input beside what it is to write in `place`."""
    data = place / f"{client.name}.input.json"
    data.write_text(json.dumps(_input_data(samples, client.signature.inputs)), "utf-8")
    command = ["-m", client.name, "-u", client.url, "-i", "grpc", "--input-data", str(data)]
    command += ["--measurement-interval", str(round(1000 * seconds / WINDOWS)), "--stability-percentage", "999"]
    command += ["--percentile", "50", "-f", str(_report(place, client.name))]
    if level.kind == "rate":  # sent when it is time, whether or not the ones before are answered
        command += ["--request-rate-range", f"{level.value:g}", "--request-distribution", "poisson", "--async"]
    else:
        command += ["--concurrency-range", f"{level.value:g}"]
    if client.signature.streams:
        command += ["--streaming", "--profile-export-file", str(_export(place, client.name))]
    return command


def _report(place: Path, name: str) -> Path:
    return place / f"{name}.csv"


def _export(place: Path, name: str) -> Path:
    return place / f"{name}.json"


def _drive(command: list[str], environment: dict[str, str], client: Client, place: Path, limit_s: float) -> Seen:
    """Run perf_analyzer and read what it wrote. Raises ServeError."""
    try:
        finished = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired as error:
        raise ServeError(
            f"perf_analyzer did not end within {limit_s:.0f} s. Ask {client.name} something with build-repo query; a "
            "model with response_cache makes perf_analyzer 2.51 hang: test without"
        ) from error
    report, export = _report(place, client.name), _export(place, client.name)
    if not report.is_file():
        lines = [line for line in (finished.stdout + finished.stderr).splitlines() if line.strip()]
        raise ServeError(f"perf_analyzer measured nothing: {lines[-1] if lines else 'it said nothing'}")
    if client.signature.streams:
        return from_export(json.loads(export.read_text("utf-8", errors="replace")))
    return from_csv(report.read_text("utf-8"))


def _input_data(samples: Sequence[Mapping[str, Any]], fields: Sequence[Field]) -> dict[str, Any]:
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
