"""Savings and cost of a shared front: `scripts/bench fleet shared`.

The same encoder under several names, with fronts of their own and behind a shared one, on one server:

1. Memory of a model, and the time until it answers for the first time.
2. Where that time goes: imports, tokeniser, session, first calls; in a process of its own, and in one with others.
3. Requests a second of 1 and 8 clients, by turns: one model of its own, one hosted one; all of them, of their own and
   hosted. Texts of mixed length, one a request. Clients are asyncio, in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpc
from rich.console import Console
from rich.table import Table
from tritonclient.grpc import service_pb2

from builder.building.pipeline import build
from builder.checkpoints.libraries import quiet_libraries
from builder.common.samples import TEXTS
from builder.options import make_spec
from builder.repository.sharing.share import share
from builder.runtime.fields import Field
from builder.serving.gateway.residency.memory import TritonProcesses
from builder.serving.gateway.served_model import MODEL_INPUT
from builder.serving.gateway.tensors import add_tensor
from builder.serving.gateway.triton import Triton
from builder.serving.server.triton import running
from scripts.benchmarks.circumstances import circumstances, write_figures
from scripts.benchmarks.traffic import mixed_texts
from tests.models import minilm
from tests.tiny_encoders import make_checkpoint

FRONT, BASE = "encoders", "base"
CLIENTS = (1, 8)
SIDES = ("one, own front", "one, hosted", "all, own fronts", "all, hosted")
TEXT = Field("text_input", "TYPE_STRING")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench fleet shared")
    parser.add_argument("--repository", type=Path, help="keep the models here; built there where they are not")
    parser.add_argument("--models", type=int, default=6, help="names of the encoder on either side (default 6)")
    parser.add_argument("--tiny", action="store_true", help="a tiny encoder with random weights instead of MiniLM int8")
    parser.add_argument("--threads", type=int, help="of a model's engine (default: all cores)")
    parser.add_argument("--seconds", type=float, default=2.5, help="of each side and number of clients (default 2.5)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each (default 2)")
    parser.add_argument("--output", type=Path, help="write the figures here, as JSON")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, quiet_libraries():
        repository = options.repository or Path(folder) / "repository"
        if not repository.exists():
            make_models(repository, Path(folder), options)
        figures = measure(repository, options)
    kind = ("tiny" if options.tiny else "minilm_int8") + (f", threads {options.threads}" if options.threads else "")
    show(figures)
    write_figures(options.output, {**circumstances(), kind: figures})


def make_models(repository: Path, folder: Path, options: argparse.Namespace) -> None:
    """Create own-N with fronts of their own, and hosted-N behind `FRONT`."""
    checkpoint, chosen = (
        (make_checkpoint(folder / "tiny", "bert", "feature-extraction"), {})
        if options.tiny
        else (minilm(), {"precision": "int8"})
    )
    build(make_spec(model=str(checkpoint), name=BASE, output=repository, threads=options.threads, **chosen))
    names = [f"{side}-{number}" for side in ("own", "hosted") for number in range(options.models)]
    for name in names:
        copy_model(repository / BASE, repository / name)
    shutil.rmtree(repository / BASE)
    share(repository, FRONT, [name for name in names if name.startswith("hosted")], memory_mb=8192)


def copy_model(model: Path, copy: Path) -> None:
    """Copy a build under another name; its large files are links."""
    shutil.copytree(model, copy, copy_function=lambda source, target: Path(target).hardlink_to(source))
    for config in (copy / "config.pbtxt", copy / "1" / "config.pbtxt"):
        _rewrite(config, config.read_text().replace(f'name: "{model.name}"', f'name: "{copy.name}"', 1))
    for report in (copy / "build.json", copy / "1" / "build.json"):
        document = json.loads(report.read_text())
        document |= {"name": copy.name, "files": {copy.name: document["files"][model.name]}}
        document["files"][copy.name].pop("config.pbtxt", None)
        _rewrite(report, json.dumps(document))


def _rewrite(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


def measure(repository: Path, options: argparse.Namespace) -> dict[str, Any]:
    figures: dict[str, Any] = {"stages": stages(repository)}
    with running(repository, timeout_s=240) as server:
        processes = TritonProcesses(server.url)
        assert processes.find()
        figures["models"] = loads(server.url, processes, options.models)
        figures["throughput"] = asyncio.run(throughput(server.url, options))
    return figures


def stages(repository: Path) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each stage of opening a version, the first and the second in one new process."""
    folders = [str(repository / FRONT / "models" / f"hosted-{number}" / "1") for number in range(2)]
    program = [sys.executable, "-m", "scripts.benchmarks.opening", *folders]
    figures: dict[str, dict[str, float]] = json.loads(
        subprocess.run(program, check=True, capture_output=True, text=True).stdout
    )
    return figures


def loads(url: str, processes: TritonProcesses, count: int) -> dict[str, Any]:
    """Measure the bytes and seconds of a model with a front of its own, and of a hosted one."""
    own: list[float] = []
    with grpc.InferenceServerClient(url) as client:
        for number in range(count):
            client.unload_model(f"own-{number}")
        time.sleep(1)
        for number in range(count):
            began = time.perf_counter()
            client.load_model(f"own-{number}")
            ask(client, f"own-{number}", None)
            own.append(time.perf_counter() - began)
        empty = processes.usage().models[FRONT]
        hosted, sizes = [], []
        for number in range(count):
            began = time.perf_counter()
            ask(client, FRONT, f"hosted-{number}")
            hosted.append(time.perf_counter() - began)
            sizes.append(processes.usage().models[FRONT])
        usage = processes.usage().models
        again = []
        for number in range(count):
            began = time.perf_counter()
            ask(client, FRONT, f"hosted-{number}")
            again.append(time.perf_counter() - began)
    return {
        "own_mb": round(float(np.median([usage[f"own-{number}"] for number in range(count)])) / 1e6, 1),
        "own_first_answer_s": _rounded(own),
        "shared_empty_mb": round(empty / 1e6, 1),
        "shared_first_mb": round(sizes[0] / 1e6, 1),
        "hosted_mb": round((sizes[-1] - sizes[0]) / (count - 1) / 1e6, 1),
        "hosted_first_answer_s": _rounded(hosted),
        "hosted_later_answer_s": _rounded(again),
    }


def _rounded(seconds: Sequence[float]) -> list[float]:
    return [round(value, 4) for value in seconds]


def ask(client: Any, name: str, model: str | None) -> None:
    fields = {"text_input": TEXTS[0]} | ({"model": model} if model is not None else {})
    inputs = [
        grpc.InferInput(key, [1, 1], "BYTES").set_data_from_numpy(np.array([[value.encode()]], np.object_))
        for key, value in fields.items()
    ]
    client.infer(name, inputs)


async def throughput(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the requests a second and the median request in ms of every turn, by side and number of clients."""
    triton = Triton(url)
    texts = mixed_texts(lambda text: len(text.split()))
    figures: dict[str, dict[str, list[Any]]] = {side: {str(n): [] for n in CLIENTS} for side in SIDES}
    for _, clients, side in itertools.product(range(options.rounds), CLIENTS, SIDES):
        figures[side][str(clients)].append(await turn(triton, side, clients, texts, options))
    await triton.close()
    return figures


async def turn(
    triton: Triton, side: str, clients: int, texts: Sequence[str], options: argparse.Namespace
) -> Mapping[str, float]:
    times_ms: list[float] = []
    numbers = itertools.count()
    until = time.perf_counter() + options.seconds

    async def client() -> None:
        while time.perf_counter() < until:
            number = next(numbers)
            began = time.perf_counter()
            await triton.infer(request(side, number % options.models, texts[number % len(texts)]))
            times_ms.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - began
    return {
        "requests_per_s": round(len(times_ms) / seconds, 1),
        "p50_ms": round(1000 * float(np.percentile(times_ms, 50)), 2),
        "p99_ms": round(1000 * float(np.percentile(times_ms, 99)), 2),
    }


def request(side: str, number: int, text: str) -> service_pb2.ModelInferRequest:
    number = number if side.startswith("all") else 0
    message = service_pb2.ModelInferRequest(model_name=f"own-{number}" if "own" in side else FRONT)
    if "hosted" in side:
        add_tensor(message, MODEL_INPUT, [f"hosted-{number}"], (1, 1))
    add_tensor(message, TEXT, [text], (1, 1))
    return message


def show(figures: Mapping[str, Any]) -> None:
    console = Console(width=120)
    console.print_json(data={name: figures[name] for name in ("stages", "models")})
    table = Table(title="requests/s (median ms), each turn", title_justify="left")
    table.add_column("")
    for clients in CLIENTS:
        table.add_column(f"{clients} clients")
    for side, counts in figures["throughput"].items():
        cells = [", ".join(f"{t['requests_per_s']} ({t['p50_ms']})" for t in counts[str(n)]) for n in CLIENTS]
        table.add_row(side, *cells)
    console.print(table)
