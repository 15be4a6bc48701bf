"""BERT-large for questions (post 3): size, F1 and latency of each step, then served three ways at each length.

Size and latency are of the BERT-large shape with random weights, of which 40 % of the heads and 80 % of the neurons
are then emptied, as block movement pruning leaves them. F1 is of a small BERT that the tests train, taken through the
same steps; it is pruned by --prune 0.4 instead, because nothing in it is empty.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForQuestionAnswering

from builder import Client, running
from builder.building.pipeline import build
from builder.building.variants.candidates import VariantMaker
from builder.checkpoints.resolve import resolve
from builder.common.machine import available_cores
from builder.common.samples import TEXTS
from builder.engines import infer_with
from builder.engines.encoding import Variant
from builder.engines.optimise.compaction import compact
from builder.graphs.export.encoder import export
from builder.graphs.onnx.graph import Graph
from builder.options import make_spec
from builder.serving.server.triton import free_ports
from scripts.benchmarks.posts import Row, alone, median_ms
from tests.tiny_encoders import make_tokenizer
from tests.trained import question_answering

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
LENGTHS = (8, 16, 32, 64, 128, 256, 512)
REQUESTS = 50
SHAPE = (1, 384)  # the post's own: one question over 384 tokens
STEPS: tuple[
    tuple[str, str, Variant, bool, dict[str, Any]], ...
] = (  # name, level, variant, empty structure removed, options of the small model's build
    ("ONNX, basic (O1)", "O1", Variant("fp32", "onnxruntime"), False, {"level": "O1"}),
    ("fused (O2)", "O2", Variant("fp32", "onnxruntime"), False, {}),
    ("fused, pruned", "O2", Variant("fp32", "onnxruntime"), True, {"prune": 0.4}),
    ("pruned, fp16", "O2", Variant("fp16", "openvino"), True, {"prune": 0.4, "precision": "fp16"}),
    ("pruned, bf16", "O2", Variant("bf16", "openvino"), True, {"prune": 0.4, "precision": "bf16"}),
    ("pruned, int8-static OpenVINO", "O2", Variant("int8-static", "openvino"), True, {"prune": 0.4}),
)


def five_steps(folder: Path, environments: Path) -> list[Row]:
    """Measure size, latency at one row of 384 tokens, and F1."""
    checkpoint = make_large(folder / "bert-large")
    base = alone(_pytorch, checkpoint)
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) / 1e6
    _, samples = question_answering()
    rows = [Row("PyTorch", f"{size:.0f} MB, {base:.0f} ms, F1 {_small_f1(folder, None):.3f}", 1.0)]
    for name, level, variant, emptied, options in STEPS:
        megabytes, ms = alone(_step, checkpoint, folder, level, variant, emptied)
        if variant.precision == "int8-static":
            options = {**options, "precision": "int8-static", "engine": "openvino"}
        f1 = _small_f1(folder, {**options, "samples": samples})
        rows.append(Row(name, f"{megabytes:.0f} MB, {ms:.0f} ms, F1 {f1:.3f}", base / ms))
    return rows


def served(folder: Path, environments: Path) -> list[Row]:
    """Return mean and deviation of 50 serial requests at each length; ratios are to FastAPI with PyTorch."""
    checkpoint = make_large(folder / "bert-large")
    graph = alone(_fused, checkpoint, folder)
    figures: dict[str, dict[int, tuple[float, float]]] = {}
    for title, engine in (("FastAPI, PyTorch", "pytorch"), ("FastAPI, ONNX Runtime, I/O binding", str(graph))):
        with _fastapi(checkpoint, engine) as ask:
            figures[title] = _lengths(ask, checkpoint)
    for title, options in (
        ("Triton, fp32, empty structure out", {}),
        ("Triton, int8-static OpenVINO", {"precision": "int8-static", "engine": "openvino"}),
    ):
        output = folder / title.replace(" ", "-")
        name = {"name": "large", "task": "question-answering", "max_length": 512, "output": output}
        alone(build, make_spec(model=str(checkpoint), quality=0.0, samples=_few_samples(folder), **name, **options))
        with running(output, timeout_s=300) as server, Client(server.url, "large") as client:
            figures[title] = _lengths(client.ask, checkpoint)
    base = figures["FastAPI, PyTorch"]
    return [
        Row(f"{title}, {length} tokens", f"{mean:.1f} ± {deviation:.1f} ms", base[length][0] / mean)
        for length in LENGTHS
        for title, means in figures.items()
        for mean, deviation in [means[length]]
    ]


def make_large(folder: Path) -> Path:
    """Create BERT-large with random weights, 40 % of its heads and 80 % of its neurons empty."""
    if (folder / "model.safetensors").exists():
        return folder
    torch.manual_seed(0)
    tokenizer = make_tokenizer("wordpiece", type_ids=True)
    config = AutoConfig.for_model("bert", vocab_size=30522, **LARGE)
    model = AutoModelForQuestionAnswering.from_config(config).eval()
    generator = np.random.default_rng(0)
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            heads = generator.permutation(16)[:6]
            columns = (heads[:, None] * 64 + np.arange(64)).ravel()
            layer.attention.output.dense.weight[:, columns] = 0
            layer.output.dense.weight[:, generator.permutation(4096)[:3277]] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _pytorch(checkpoint: Path) -> float:
    torch.set_num_threads(available_cores())
    model = AutoModelForQuestionAnswering.from_pretrained(checkpoint).eval()
    ids = torch.ones(SHAPE, dtype=torch.long)
    with torch.inference_mode():
        return median_ms(lambda: model(input_ids=ids, attention_mask=ids))


def _exported(checkpoint: Path, folder: Path, level: str) -> tuple[Any, Graph]:
    spec = make_spec(model=str(checkpoint), name="large", task="question-answering", level=level)
    return spec, export(resolve(spec), folder).graph


def _step(checkpoint: Path, scratch: Path, level: str, variant: Variant, emptied: bool) -> tuple[float, float]:
    """Return (MB, ms) of one variant of the large shape."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        spec, graph = _exported(checkpoint, Path(folder), level)
        if emptied:
            graph, removed = compact(graph, Path(folder))
            assert removed is not None
            assert (removed.heads, removed.neurons) == (24 * 6, 24 * 3277)
        generator = np.random.default_rng(0)
        shape = (4, 64)
        feed = {"input_ids": generator.integers(100, 600, shape), "attention_mask": np.ones(shape, np.int64)}
        feed["token_type_ids"] = np.zeros(shape, np.int64)
        optimised = VariantMaker(spec, graph, Path(folder), [feed]).make(variant).graph
        run = infer_with(optimised, available_cores(), spinning=True)
        ones = {name: np.ones(SHAPE, np.int64) for name in optimised.inputs}
        return optimised.size / 1e6, median_ms(lambda: run(ones))


def _fused(checkpoint: Path, scratch: Path) -> Path:
    """Return the graph that the FastAPI side serves: exported and fused, without pruning or quantisation."""
    folder = scratch / "fastapi-graph"
    folder.mkdir(exist_ok=True)
    spec, graph = _exported(checkpoint, folder, "O2")
    return VariantMaker(spec, graph, folder, ()).fused.path


def _small_f1(folder: Path, options: dict[str, Any] | None) -> float:
    """Return F1 of the small trained model after a step, or of PyTorch itself for None."""
    model, samples = question_answering()
    wanted = {"samples": samples, **(options or {})}
    with tempfile.TemporaryDirectory(dir=folder) as output:
        spec = make_spec(model=str(model), name="small", output=Path(output), quality=0.0, **wanted)
        report = alone(build, spec)
    return float(report.variants[0 if options is None else -1].scores["F1"])


def _few_samples(folder: Path) -> Path:
    """Write short samples: PyTorch answers each of them at every build."""
    path = folder / "few.jsonl"
    lines = [{"question": "What happened?", "context": text} for text in TEXTS[:24]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def _lengths(ask: Callable[[dict[str, Any]], Any], checkpoint: Path) -> dict[int, tuple[float, float]]:
    """Return the milliseconds, mean and deviation, of random questions of each length."""
    tokenizer = make_tokenizer("wordpiece", type_ids=True)
    words = [word for word in " ".join(TEXTS).split() if len(tokenizer(word)["input_ids"]) == 3]  # one token each
    generator = np.random.default_rng(0)
    lengths = {}
    for length in LENGTHS:
        times = []
        for number in range(REQUESTS + 3):
            chosen = generator.choice(words, length - 3)
            sample = {"question": " ".join(chosen[:2]), "context": " ".join(chosen[2:])}
            start = time.perf_counter()
            ask(sample)
            if number >= 3:
                times.append((time.perf_counter() - start) * 1000)
        lengths[length] = (float(np.mean(times)), float(np.std(times)))
    return lengths


@contextmanager
def _fastapi(checkpoint: Path, engine: str) -> Iterator[Callable[[dict[str, Any]], Any]]:
    port = free_ports().http
    command = [sys.executable, "-m", "uvicorn", "scripts.benchmarks.posts.fastapi_qa:app", "--port", str(port)]
    environment = {**os.environ, "MODEL": str(checkpoint), "ENGINE": engine, "OMP_NUM_THREADS": str(available_cores())}
    process = subprocess.Popen([*command, "--log-level", "warning"], env=environment)
    connection = http.client.HTTPConnection("127.0.0.1", port)

    def ask(sample: dict[str, Any]) -> Any:
        try:
            connection.request("POST", "/answer", json.dumps(sample), {"Content-Type": "application/json"})
            response = connection.getresponse()
            body = response.read()
        except OSError:
            connection.close()  # otherwise it refuses the next request
            raise
        if response.status != 200:
            raise RuntimeError(body.decode())
        return json.loads(body)

    try:
        for _ in range(300):
            try:
                ask({"question": "ready", "context": "the"})
                break
            except OSError:
                time.sleep(0.2)
        yield ask
    finally:
        process.terminate()
        process.wait()
