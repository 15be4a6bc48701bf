"""Activity of an encoder's threads between two calls: `scripts/bench spinning`.

all-MiniLM-L6-v2 in int8, in process, three times in one server: with threads that spin after a call, which is ONNX
Runtime's default, that rest when it ends, which is build-repo's default, and that never spin. All are asked the samples
in short turns, in an order drawn anew, with pauses between them that are longer than threads spin. The processor time
is that of the model's process, from /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from rich.console import Console
from rich.table import Table
from tritonclient.grpc import service_pb2, service_pb2_grpc

from builder.building.pipeline import build
from builder.common.samples import TEXTS
from builder.options import make_spec
from builder.runtime.contract import FILE
from builder.runtime.fields import Field
from builder.serving.gateway.tensors import add_tensor
from builder.serving.server.triton import running
from scripts.benchmarks.circumstances import circumstances, write_figures
from tests.models import minilm

ALLOWED, REST = "session.intra_op.allow_spinning", "session.force_spinning_stop"
SIDES: Mapping[str, Mapping[str, str]] = {
    "spin": {ALLOWED: "1"},
    "rest": {ALLOWED: "1", REST: "1"},
    "never": {ALLOWED: "0"},
}
CLIENTS = (1, 8, 32)
TURN_S = 0.8
PAUSE_S = 0.15
COLUMNS = ("threads", "clients", "requests/s", "quartiles", "x spin", "p50 ms", "CPU ms a request")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench spinning")
    parser.add_argument("--repository", type=Path, help="keep the models here; built there where they are not")
    parser.add_argument("--seconds", type=float, default=60, help="in all (default 60)")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.repository or Path(scratch) / "repository"
        make_models(folder)
        with running(folder) as server:
            figures = {**circumstances(), **asyncio.run(measure(server.url, folder, options.seconds))}
    show(Console(width=110), figures)
    if options.output:
        write_figures(options.output, figures)


def make_models(folder: Path) -> None:
    """Build the same model under the name of each side."""
    for name, entries in SIDES.items():
        if not (folder / name).exists():
            build(make_spec(model=str(minilm()), name=name, output=folder, precision="int8"))
        for serving in (folder / name).glob(f"*/{FILE}"):
            document = json.loads(serving.read_text())
            document["session"]["entries"] = dict(entries)
            replaced = serving.with_suffix(".new")  # equal files of a repository are one
            replaced.write_text(json.dumps(document))
            replaced.replace(serving)


async def measure(url: str, folder: Path, seconds: float) -> dict[str, Any]:
    stubs = {name: _process(folder, name) for name in SIDES}
    turns: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    draw, end = random.Random(0), time.monotonic() + seconds
    async with grpc.aio.insecure_channel(url) as channel:
        ask = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer
        for name in SIDES:
            await _turn(ask, name, CLIENTS[-1], stubs[name])
        while time.monotonic() < end:
            for clients in CLIENTS:
                for name in draw.sample(list(SIDES), len(SIDES)):
                    await asyncio.sleep(PAUSE_S)
                    turns.setdefault((name, clients), []).append(await _turn(ask, name, clients, stubs[name]))
    return {name: {clients: _summary(turns, name, clients) for clients in CLIENTS} for name in SIDES}


async def _turn(ask: Any, name: str, clients: int, process: int) -> tuple[float, float, float]:
    """Return the requests a second, the median ms of one, and the processor ms of one and of what follows it."""
    latencies: list[float] = []
    texts, cpu, start = _texts(), _cpu_s(process), time.perf_counter()

    async def client() -> None:
        while time.perf_counter() - start < TURN_S:
            request = service_pb2.ModelInferRequest(model_name=name)
            add_tensor(request, Field("text_input", "TYPE_STRING"), [next(texts)], (1, 1))
            begun = time.perf_counter()
            await ask(request)
            latencies.append(time.perf_counter() - begun)

    await asyncio.gather(*(client() for _ in range(clients)))
    rate = len(latencies) / (time.perf_counter() - start)
    await asyncio.sleep(PAUSE_S)
    return rate, 1000 * float(np.median(latencies)), 1000 * (_cpu_s(process) - cpu) / len(latencies)


def _texts() -> Iterator[str]:
    return (TEXTS[number % len(TEXTS)] for number in count())


def _summary(turns: Mapping[tuple[str, int], Any], name: str, clients: int) -> dict[str, Any]:
    rates, latencies, cpu = np.array(turns[name, clients]).T
    return {
        "requests_per_s": float(np.median(rates)),
        "quartiles": np.quantile(rates, (0.25, 0.75)).tolist(),
        "against_spin": float(np.median(rates / np.array(turns["spin", clients])[:, 0])),  # turn by turn
        "p50_ms": float(np.median(latencies)),
        "cpu_ms": float(np.median(cpu)),
        "turns": len(rates),
    }


def _process(folder: Path, name: str) -> int:
    """Return the process id of a model: its stub has the model's folder on its command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            command = _command(entry)
            if "triton_python_backend_stub" in command and f"{folder.resolve()}/{name}/" in command:
                return int(entry.name)
    raise RuntimeError(f"no process of {name} was found in /proc")


def _command(process: Path) -> str:
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:  # it has ended since
        return ""


def _cpu_s(process: int) -> float:
    """Return the processor seconds of a process: utime and stime of proc_pid_stat(5)."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def show(console: Console, figures: Mapping[str, Any]) -> None:
    table = Table(title=f"{figures['cores']} cores, {figures['cpu']}", title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for name in SIDES:
        for clients, row in figures[name].items():
            low, high = row["quartiles"]
            table.add_row(
                name, str(clients), f"{row['requests_per_s']:.0f}", f"{low:.0f}-{high:.0f}",
                f"{row['against_spin']:.2f}", f"{row['p50_ms']:.2f}", f"{row['cpu_ms']:.2f}",
            )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    main()
