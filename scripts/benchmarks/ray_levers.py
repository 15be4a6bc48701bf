"""Effect of Ray Serve's settings on a request: `scripts/bench ray_levers`.

`build-repo serve` on all-MiniLM-L6-v2 in int8, through the gateway alone and through Ray with one replica, once with
each of the settings: one side after the other, as often as --rounds says, because the work of an idle cluster would
disturb the others. Besides the latency of one client and the rate of several, it reports the processor milliseconds
that each program takes for a request, which depend less on the other load of the machine. The settings are those of
Ray 2.60 (ray/serve/_private/constants.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from builder.building.pipeline import build
from builder.options import make_spec
from builder.serving.server.triton import free_ports
from scripts.benchmarks.circumstances import circumstances, write_figures
from scripts.benchmarks.fleet_builds import family, processor_s
from scripts.benchmarks.gateway import Through
from scripts.benchmarks.ray import turn
from tests.models import minilm

BUILD_REPO = str(Path(sys.executable).with_name("build-repo"))
ALONE = "the gateway alone"
ONE_LOOP = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
FEW_LOGS = {"RAY_SERVE_LOG_TO_STDERR": "0", "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000"}
GRPC = {"RAY_SERVE_USE_GRPC_BY_DEFAULT": "1"}
RAYS_OWN = {
    **dict.fromkeys(ONE_LOOP, "1"),
    "RAY_SERVE_LOG_TO_STDERR": "1",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "0",
}
LEVERS: dict[str, Mapping[str, str] | None] = {  # over Ray's own; none: without Ray
    ALONE: None,
    "Ray": {},
    "one loop": ONE_LOOP,
    "few logs": FEW_LOGS,
    "gRPC": GRPC,
    "one loop, few logs": {**ONE_LOOP, **FEW_LOGS},
    "one loop, few logs, gRPC": {**ONE_LOOP, **FEW_LOGS, **GRPC},
}
PROGRAMS = {  # by a part of their command lines
    "ProxyActor": "proxy",
    "triton:Gateway": "gateway",
    "triton:Triton": "replica",
    "\0gateway\0": "gateway",
    "triton_python_backend_stub": "model",
    "tritonserver": "Triton",
}
START_S, STOP_S = 300.0, 120.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench ray_levers")
    parser.add_argument("--repository", type=Path, help="keep the model here; built there where it is not")
    parser.add_argument("--levers", nargs="+", choices=LEVERS, default=LEVERS, help="all of them unless given")
    parser.add_argument("--rounds", type=int, default=1, help="of all of them (default 1)")
    parser.add_argument("--seconds", type=float, default=4, help="of each number of clients (default 4)")
    parser.add_argument("--clients", type=int, default=16, help="that ask at once (default 16)")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args()
    figures: dict[str, list[dict[str, Any]]] = {name: [] for name in options.levers}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.repository or Path(scratch) / "repository"
        if not (folder / "minilm").exists():
            build(make_spec(model=str(minilm()), name="minilm", output=folder, precision="int8"))
        for name in [name for _ in range(options.rounds) for name in options.levers]:
            figures[name].append(measure(folder, LEVERS[name], options))
            print(name, json.dumps(figures[name][-1]), flush=True)
            if options.output:
                write_figures(options.output, {**circumstances(), "levers": figures})
    show(figures, options.clients)


def measure(folder: Path, lever: Mapping[str, str] | None, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one client, then several: milliseconds, requests a second, and processor milliseconds per request."""
    with served(folder, lever) as (process, port):
        asyncio.run(turn(port, options.clients, 2))  # nothing is asked for the first time afterwards
        alone = asyncio.run(turn(port, 1, options.seconds))
        before = _used(process)
        many = asyncio.run(turn(port, options.clients, options.seconds))
        used = {program: seconds - before.get(program, 0.0) for program, seconds in _used(process).items()}
    count = sum(many.counts)
    return {
        "alone_p50_ms": round(float(np.percentile(alone.ms, 50)), 1),
        "p50_ms": round(float(np.percentile(many.ms, 50)), 1),
        "p99_ms": round(float(np.percentile(many.ms, 99)), 1),
        "requests_s": round(count / many.seconds, 1),
        "processor_ms": {program: round(1000 * seconds / count, 2) for program, seconds in used.items()},
    }


@contextmanager
def served(folder: Path, lever: Mapping[str, str] | None) -> Iterator[tuple[int, int]]:
    """Run `build-repo serve`; yield its process and the port on which it answers."""
    port, own = free_ports().http, free_ports()
    command = [BUILD_REPO, "serve", str(folder), "--openai-port", str(port)]
    ports = [f"--http-port={own.http}", f"--grpc-port={own.grpc}", f"--metrics-port={own.metrics}"]
    command += ports if lever is None else ["--ray", "--replicas", "1"]
    environment = {**os.environ, **RAYS_OWN, **(lever or {})}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        asyncio.run(_answers(process, port))
        yield process.pid, port
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def _answers(process: subprocess.Popen[bytes], port: int) -> None:
    """Wait until an embedding comes."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, f"build-repo serve ended with {process.returncode}"
        with suppress(OSError, EOFError, AssertionError, LookupError, ValueError):  # it is not ready yet
            await Through(port).embed()
            return
        await asyncio.sleep(0.3)
    raise TimeoutError(f"no answer in {START_S:.0f} s")


def _used(process: int) -> dict[str, float]:
    """Return the processor seconds by program, of a process and its descendants."""
    used: defaultdict[str, float] = defaultdict(float)
    for pid in family(process):
        used[_program(pid)] += processor_s(pid)
    return dict(used)


def _program(process: int) -> str:
    try:
        words = Path(f"/proc/{process}/cmdline").read_text(errors="replace")
    except OSError:
        return "others"
    return next((name for part, name in PROGRAMS.items() if part in words), "others")


def show(figures: Mapping[str, list[dict[str, Any]]], clients: int) -> None:
    table = Table(title="embeddings; every figure once a round", title_justify="left")
    columns = {"one client, ms": "alone_p50_ms", f"{clients}, ms": "p50_ms", "p99, ms": "p99_ms", "1/s": "requests_s"}
    for column in ("side", *columns, "processor, ms a request"):
        table.add_column(column, justify="left" if column == "side" else "right")
    for name, rounds in figures.items():
        values = [" ".join(str(one[field]) for one in rounds) for field in columns.values()]
        processor = " ".join(f"{sum(one['processor_ms'].values()):.1f}" for one in rounds)
        table.add_row(name, *values, processor)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
