"""Cost of a decode step and its causes, on one GPT-2 124M shape with random weights: `scripts/bench decoding`.

1. The cache: bytes that each design moves per token besides what attention must read, and the time of a step.
2. The limits: a step against the memory bandwidth (one row) and the 8-bit arithmetic (16 rows) of this machine.
3. A shared beginning: the time to the first token with and without the prefix cache, through Triton.
4. Two executors: in process, and as a Triton model of its own through BLS.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from builder.building.pipeline import build
from builder.checkpoints.libraries import quiet_libraries
from builder.common.machine import available_cores
from builder.engines.onnxruntime import run_with
from builder.options import make_spec
from builder.runtime.contract import Session, load_generation
from builder.runtime.generation.executors.base import Geometry
from builder.runtime.generation.executors.onnxruntime import InProcess
from builder.runtime.sessions import open_session
from builder.serving.server.triton import running
from scripts.benchmarks.circumstances import circumstances
from scripts.benchmarks.generation import WorkItem, load, make_work
from scripts.benchmarks.generators import make_checkpoint

CONTEXTS = (64, 256, 640)


@quiet_libraries()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench decoding")
    parser.add_argument("--checkpoints", type=Path, help="keep the checkpoint here")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    options = parser.parse_args()
    console = Console(width=110)
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = make_checkpoint("gpt2", (options.checkpoints or Path(scratch)) / "gpt2")
        folders = {name: Path(scratch) / name for name in ("prefixes", "none", "bls")}
        for name, folder in folders.items():
            serving = {"prefix_cache": name != "none"}
            executor = "bls" if name == "bls" else "in-process"
            build(_spec(checkpoint, folder, executor=executor, serving=serving))
        version = folders["prefixes"] / "model" / "1"
        figures: dict[str, Any] = circumstances()
        figures["cache"] = cache_designs(console, version)
        figures["limits"] = limits(console, version)
        work = make_work(AutoTokenizer.from_pretrained(checkpoint), 24)
        figures["prefixes"] = prefixes(console, folders, work)
        figures["executors"] = executors(console, folders, work)
    if options.output:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


def _spec(checkpoint: Path, folder: Path, **options: Any) -> Any:
    return make_spec(
        model=str(checkpoint),
        name="model",
        output=folder,
        precision="int8",
        max_length=768,
        slots=16,
        beams=1,
        quality=0.0,  # random weights have none to lose
        perplexity=1e9,
        **options,
    )


def _median_ms(run: Callable[[], object], least: int = 10) -> float:
    for _ in range(3):
        run()
    times: list[float] = []
    while len(times) < least or (sum(times) < 0.5 and len(times) < 200):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1000


def executor_of(version: Path) -> InProcess:
    """Return the emitted executor over a published model's graph."""
    serving = load_generation(version)
    layers = Geometry.pairs(serving.arena.layers)
    return InProcess(version / "model.onnx", Geometry(16, 768, serving.vocabulary, layers), serving.session)


def cache_designs(console: Console, version: Path) -> list[dict[str, Any]]:
    """Measure one row after T tokens: numpy in and out, I/O binding with a new cache each step, and in place."""
    executor = executor_of(version)
    session, geometry = executor.session, executor.geometry
    position = sum(2 * heads * size * 4 for heads, size in geometry.layers)  # bytes that one token adds
    rows: list[dict[str, Any]] = []
    for context in CONTEXTS:
        feeds = {
            "input_ids": np.array([[5]]),
            "position_ids": np.array([[context]]),
            "seqlens_k": np.array([context], np.int32),
            "total_sequence_length": np.array([context + 1], np.int32),
            "logits_positions": np.zeros(1, np.int64),
        }
        past = {f"past_{n}": np.ascontiguousarray(t[:1, :, :context]) for n, t in executor.arena.items()}
        naive = run_with(session)
        binding = session.io_binding()
        held = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in {**feeds, **past}.items()}

        def bound(binding: Any = binding, held: dict[str, Any] = held) -> None:
            for name, value in held.items():
                binding.bind_ortvalue_input(name, value)
            for name in executor.arena:
                binding.bind_output(f"present_{name}", "cpu")
            binding.bind_output("logits", "cpu")
            session.run_with_iobinding(binding)

        tokens, lengths = np.array([[5]]), np.array([context])
        cache = position * context
        rows.append(
            {
                "context": context,
                "numpy": {"bytes": 4 * cache, "ms": _median_ms(lambda: naive({**feeds, **past}))},  # noqa: B023
                "binding": {"bytes": 2 * cache, "ms": _median_ms(bound)},
                "in place": {"bytes": position, "ms": _median_ms(lambda: executor.run(0, tokens, lengths))},  # noqa: B023
            }
        )
    table = Table(title="one token after T: MB moved beside attention's reading, ms a step", title_justify="left")
    for column in ("T", "session.run, numpy", "I/O binding, new cache", "in place"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [f"{row[d]['bytes'] / 1e6:.2f} MB, {row[d]['ms']:.2f} ms" for d in ("numpy", "binding", "in place")]
        table.add_row(str(row["context"]), *cells)
    console.print(table)
    return rows


def limits(console: Console, version: Path) -> dict[str, float]:
    """Measure steps against the machine's limits: reading all weights once, and multiplying them all."""
    executor = executor_of(version)
    weights = (version / "model.onnx").stat().st_size
    products = 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072) + 768 * 50257
    one, sixteen = (
        _median_ms(lambda: executor.run(0, np.full((rows, 1), 5), np.full(rows, 16)))  # noqa: B023
        for rows in (1, 16)
    )
    figures = {
        "bandwidth_gb_s": _bandwidth(),
        "int8_gop_s": int8_peak(),
        "weights_mb": weights / 1e6,
        "step_1_ms": one,
        "step_16_ms": sixteen,
    }
    figures["limit_1_ms"] = products / figures["bandwidth_gb_s"] / 1e6
    figures["limit_16_ms"] = 2 * 16 * products / figures["int8_gop_s"] / 1e6
    console.print(
        f"one row: {one:.2f} ms, reading {products / 1e6:.0f} MB at {figures['bandwidth_gb_s']:.0f} GB/s would take "
        f"{figures['limit_1_ms']:.2f} ms; 16 rows: {sixteen:.2f} ms, their products at "
        f"{figures['int8_gop_s']:.0f} GOP/s would take {figures['limit_16_ms']:.2f} ms",
        highlight=False,
    )
    return figures


def _bandwidth() -> float:
    """Return the bandwidth of reading memory with all threads in GB/s, the best of several runs."""
    data = torch.ones(1 << 28)  # 1 GB of float32
    best = min(_timed(lambda: data.sum()) for _ in range(5))
    return data.numel() * 4 / best / 1e9


def int8_peak() -> float:
    """Return the GOP/s of ONNX Runtime's own 8-bit product on a large square."""
    size = 2048
    weight = numpy_helper.from_array(np.ones((size, size), np.int8), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"])],
        "peak",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, [size, size])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [size, size])],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 9
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(model, f"{folder}/peak.onnx")
        session = open_session(Path(folder) / "peak.onnx", Session(threads=available_cores()))
    feeds = {"x": np.ones((size, size), np.uint8)}
    return 2 * size**3 / min(_timed(lambda: session.run(None, feeds)) for _ in range(10)) / 1e9


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def prefixes(console: Console, folders: dict[str, Path], work: list[WorkItem]) -> dict[str, Any]:
    """Measure twelve requests that share about 400 first tokens, one after the other and four at once."""
    longest = max(work, key=lambda request: len(request.prompt))
    begin = longest.text[: len(longest.text) * 400 // max(len(longest.prompt), 400)]
    shared = [WorkItem(f"{begin} {index} {request.text[:60]}", [], 24) for index, request in enumerate(work[:12])]
    figures: dict[str, Any] = {}
    for name in ("prefixes", "none"):
        with running(folders[name]) as server:
            load(server.url, work[:2], 1)
            figures[name] = {str(clients): load(server.url, shared, clients) for clients in (1, 4)}
    for clients in ("1", "4"):
        with_it, without = figures["prefixes"][clients], figures["none"][clients]
        console.print(
            f"shared beginning, {clients} clients: first token after {with_it['first_token_ms']:.0f} ms with the "
            f"prefix cache, {without['first_token_ms']:.0f} without; {with_it['tokens_per_s']:.0f} and "
            f"{without['tokens_per_s']:.0f} tokens/s",
            highlight=False,
        )
    return figures


def executors(console: Console, folders: dict[str, Path], work: list[WorkItem]) -> dict[str, Any]:
    """Send the same requests through both executors."""
    figures: dict[str, Any] = {}
    for name, folder in (("in process", folders["prefixes"]), ("BLS", folders["bls"])):
        with running(folder) as server:
            load(server.url, work[:1], 1)
            figures[name] = {str(clients): load(server.url, work[: 2 * clients + 1], clients) for clients in (1, 4)}
    for clients in ("1", "4"):
        here, there = figures["in process"][clients]["tokens_per_s"], figures["BLS"][clients]["tokens_per_s"]
        console.print(f"{clients} clients: in process {here:.0f} tokens/s, BLS {there:.0f}", highlight=False)
    return figures


if __name__ == "__main__":
    main()
