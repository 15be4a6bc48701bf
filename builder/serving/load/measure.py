"""Run load tests with the real perf_analyzer or AIPerf, on inputs that fit the task and are of mixed lengths.

Knows perf_analyzer's command line and files; takes a list of targets, and returns a Run.
"""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from builder.common.errors import ServeError
from builder.common.machine import available_cores, cpu
from builder.common.progress import OnProgress
from builder.runtime.fields import Field
from builder.serving.client.client import Client
from builder.serving.load import aiperf
from builder.serving.load.figures import ClientFigures, from_csv, from_export, statistics_between
from builder.serving.load.perf_analyzer import find_perf_analyzer
from builder.serving.load.record import AIPERF, PERF_ANALYZER, LoadMeasurement, LoadTestRun
from builder.serving.load.traffic import Level, Target

SAMPLES_SENT = 512  # samples in perf_analyzer's input, which it repeats
MIN_WINDOWS = 3  # perf_analyzer measures at least this many windows in a row
TIMEOUT_FACTOR = 20.0  # times the expected duration of a measurement: beyond it, perf_analyzer hangs
MAX_ATTEMPTS = 3  # perf_analyzer 2.51 sometimes breaks off while it writes a stream's requests


class _ExportInterrupted(ServeError):
    """Raised if perf_analyzer ended before it had written its measurements."""


def load_test(
    url: str,
    targets: Sequence[Target],
    levels: Sequence[Level],
    repeats: int = 3,
    seconds: float = 6.0,
    p99_ms: float | None = None,
    gateway: str | None = None,
    on_progress: OnProgress = lambda done, total: None,
) -> LoadTestRun:
    """Send load to the models `targets` at `url` together, at each of `levels`, `repeats` times for `seconds` each.

    `on_progress` is called with the number of measurements that are done, and that are to be made.
    With `gateway`, the address of a gateway over the same server, AIPerf drives the models of generation through it.

    A ramp ends after the first level that the server refuses, or at which the p99 of any model exceeds `p99_ms`;
    for a stream that is the p99 to its first token.
    Raises ServeError if the first level cannot run.
    """
    loads: list[LoadMeasurement] = []
    stopped = None
    for number, level in enumerate(levels):
        try:
            runs = []
            for seed in range(repeats):
                runs.append(measure(url, targets, level, seconds, seed, gateway))
                on_progress(number * repeats + seed + 1, len(levels) * repeats)
        except ServeError as error:
            if not loads:
                raise
            stopped = f"{level}: {error}"
            break
        measured = [load for run in runs for load in run]
        loads += measured
        stopped = None if p99_ms is None else _exceeded_limit(measured, level, p99_ms)
        if stopped is not None:
            break
    with Client(url, targets[0].name) as client:
        server = client.server()
    machine = {**cpu(), "cores": available_cores()}
    return LoadTestRun(datetime.now(UTC).isoformat(timespec="seconds"), server, machine, seconds, tuple(loads), stopped)


def _exceeded_limit(loads: Sequence[LoadMeasurement], level: Level, limit_ms: float) -> str | None:
    """Return a message on the first model whose median p99 over the repeats is above the limit, or None."""
    for name in dict.fromkeys(load.model for load in loads):
        p99 = median(load.client.bounded_ms for load in loads if load.model == name)
        if p99 > limit_ms:
            return f"{level}: p99 of {name} is {p99:.0f} ms, more than {limit_ms:g} ms"
    return None


def measure(
    url: str, targets: Sequence[Target], level: Level, seconds: float, seed: int = 0, gateway: str | None = None
) -> list[LoadMeasurement]:
    """Measure all `targets` together for `seconds`, after a warm-up; return a measurement of each.

    `seed` draws the order of the samples, and the times at which the requests of a rate are sent. Repeated if
    perf_analyzer ends too early.

    Raises ServeError if the load cannot run.
    """
    for _ in range(MAX_ATTEMPTS - 1):
        with contextlib.suppress(_ExportInterrupted):
            return _measure(url, targets, level, seconds, seed, gateway)
    return _measure(url, targets, level, seconds, seed, gateway)


def _measure(
    url: str, targets: Sequence[Target], level: Level, seconds: float, seed: int, gateway: str | None
) -> list[LoadMeasurement]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clients = [stack.enter_context(Client(url, target.name)) for target in targets]
        programs = [
            AIPERF if gateway is not None and aiperf.is_completion(client, target.samples) else PERF_ANALYZER
            for client, target in zip(clients, targets, strict=True)
        ]
        if PERF_ANALYZER in programs:
            find_perf_analyzer()  # fetched before the measurement, and once
        before = [client.statistics() for client in clients]
        with ThreadPoolExecutor(len(targets)) as pool:
            runs = [
                pool.submit(
                    _drive,
                    gateway if program == AIPERF else None,
                    client,
                    in_random_order(target.samples, seed),
                    level.part(target.share),
                    seconds,
                    seed,
                    folder,
                )
                for program, client, target in zip(programs, clients, targets, strict=True)
            ]
            seen = [run.result() for run in runs]
        served = [statistics_between(was, client.statistics()) for was, client in zip(before, clients, strict=True)]
    return [
        LoadMeasurement(target.name, level, client, server, program)
        for target, client, server, program in zip(targets, seen, served, programs, strict=True)
    ]


def _drive(
    gateway: str | None,
    client: Client,
    samples: Sequence[Mapping[str, Any]],
    level: Level,
    seconds: float,
    seed: int,
    folder: Path,
) -> ClientFigures:
    """Run AIPerf on `gateway` or, without one, perf_analyzer on Triton."""
    limit_s = TIMEOUT_FACTOR * seconds + 60
    if gateway is not None:
        return aiperf.drive(gateway, client.name, samples, level, seconds, seed, folder, limit_s)
    program, environment = find_perf_analyzer()
    command = [str(program), *_command(client, samples, level, seconds, seed, folder)]
    return _run(command, environment, client, folder, limit_s)


def _command(
    client: Client, samples: Sequence[Mapping[str, Any]], level: Level, seconds: float, seed: int, folder: Path
) -> list[str]:
    """Return perf_analyzer's options. Writes its input to `folder`, where it also writes its results."""
    data = folder / f"{client.name}.input.json"
    data.write_text(json.dumps(_input_data(samples, client.signature.inputs)), "utf-8")
    command = ["-m", client.name, "-u", client.url, "-i", "grpc", "--input-data", str(data)]
    command += ["--measurement-interval", str(round(1000 * seconds / MIN_WINDOWS)), "--stability-percentage", "999"]
    command += ["--percentile", "50", "-f", str(_report(folder, client.name))]
    if level.kind == "rate":  # sent at its time, whether or not the earlier ones are answered
        intervals = folder / f"{client.name}.intervals"
        intervals.write_text("\n".join(map(str, _intervals(level.value, seconds, seed))), "ascii")
        command += ["--request-intervals", str(intervals), "--async"]
    else:
        command += ["--concurrency-range", f"{level.value:g}"]
    if client.signature.streams:
        command += ["--streaming", "--profile-export-file", str(_export(folder, client.name))]
    return command


def in_random_order(samples: Sequence[Mapping[str, Any]], seed: int) -> list[Mapping[str, Any]]:
    """Return passes over all `samples`, each in another random order.

    The programs send them in turn: if a file has its long ones together, as ours has, they would arrive together
    too, and wait for each other.
    """
    chance = np.random.default_rng(seed)
    passes = max(1, SAMPLES_SENT // len(samples))
    return [samples[index] for _ in range(passes) for index in chance.permutation(len(samples))]


def _intervals(rate: float, seconds: float, seed: int) -> list[int]:
    """Return the microseconds between requests of a Poisson process, which starts over at its end.

    The average is `rate` a second, to the last digit. perf_analyzer's own process always begins with the same slow
    dozen, half of the rate.
    """
    count = max(2, math.ceil(2 * rate * seconds))
    drawn = np.random.default_rng(seed).exponential(size=count)
    return [max(1, round(value)) for value in drawn * (1e6 * count / rate / drawn.sum())]


def _report(folder: Path, name: str) -> Path:
    return folder / f"{name}.csv"


def _export(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _run(
    command: list[str], environment: dict[str, str], client: Client, folder: Path, limit_s: float
) -> ClientFigures:
    """Run perf_analyzer and read its results. Raises ServeError; _ExportInterrupted if measuring again may help."""
    try:
        finished = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=limit_s
        )
    except subprocess.TimeoutExpired as error:
        raise ServeError(
            f"perf_analyzer did not end within {limit_s:.0f} s. Ask {client.name} something with build-repo query; a "
            "model with response_cache makes perf_analyzer 2.51 hang: test without"
        ) from error
    report, export = _report(folder, client.name), _export(folder, client.name)
    if not report.is_file():
        lines = [line for line in (finished.stdout + finished.stderr).splitlines() if line.strip()]
        raise ServeError(f"perf_analyzer measured nothing: {lines[-1] if lines else 'it said nothing'}")
    if client.signature.streams:
        try:
            return from_export(json.loads(export.read_text("utf-8", errors="replace")))
        except (OSError, ValueError) as error:
            raise _ExportInterrupted(
                f"perf_analyzer ended, with status {finished.returncode}, while it wrote what it saw ({error}); "
                f"measure {client.name} again"
            ) from error
    return from_csv(report.read_text("utf-8"))


def _input_data(samples: Sequence[Mapping[str, Any]], fields: Sequence[Field]) -> dict[str, Any]:
    """Return perf_analyzer's JSON: each sample's inputs with their shapes; only inputs that every sample has."""
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
