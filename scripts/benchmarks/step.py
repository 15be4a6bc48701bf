"""Measure where one decode step of one row goes, beside the least time in which its weights and keys can be read.

Real shapes, random weights, in this process, without Triton. Each side is a process of its own: an engine's threads
would slow another's. `step` is the executor's call, `tokens` one that runs tokens ahead, `pieces` one of a piece of a
prompt; `rows`, on OpenVINO, one of rows with guesses, whose tokens run as rows of one token and as prompts; `loop` is
what the decode loop adds to a step; `operators` is the engine's own profile, which slows a step: read it as shares. The
limit is the bytes that a step reads over the bandwidth that the same process measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnx import helper
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from builder.building.verify.emitted import generate
from builder.building.verify.generation import geometry_of
from builder.checkpoints.libraries import quiet_libraries
from builder.common.machine import available_cores
from builder.common.replaced import replaced
from builder.engines.onnxruntime import SLOW_FUSIONS
from builder.engines.openvino import decoder_properties
from builder.engines.openvino.lowering import page_attention
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.decoder import DecoderExport, export_decoder
from builder.graphs.onnx.graph import Graph, load_graph
from builder.options import WeightOptions
from builder.runtime.contract import CacheType, Session
from builder.runtime.generation.executors.base import Executor, Geometry
from builder.runtime.generation.executors.onnxruntime import InPlace
from scripts.benchmarks.circumstances import circumstances, write_figures
from scripts.benchmarks.generators import make_checkpoint
from scripts.benchmarks.machine_limits import read_bandwidth

SIDES = "int8,int8-weights,int8-weights@128,openvino:int8,openvino:int8-weights@128"
CONTEXT, ANSWER, STEPS, MAX_LENGTH = 128, 64, 40, 512
ROWS_CONTEXT = 448  # of rows with guesses: longer, because what they cost as prompts grows with it
COUNTS = (2, 4, 8, 16)  # tokens of one row in a step with guesses
PIECES = (64, 72, 128, 136, 192, 200, 256, 264)  # tokens of a prompt: whole tiles of OpenVINO's products, and some more
ROWS = ((8, 1), (8, 2), (8, 4), (16, 1), (16, 2), (16, 4))  # rows with guesses in a step, and tokens of each
LOOKUPS = ("Gather", "GatherBlockQuantized")  # read some rows of a table
Profile = Callable[[], list[tuple[str, float]]]  # milliseconds a step by operator, the slowest first


@dataclass(frozen=True)
class Side:
    """One way to run a model: `kind` as in --sides."""

    kind: str
    graph: Graph
    geometry: Geometry

    @property
    def is_openvino(self) -> bool:
        return self.kind.startswith("openvino:")


@quiet_libraries()
def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench step")
    parser.add_argument("--models", default="gpt2")
    parser.add_argument("--sides", default=SIDES, help="[openvino:]PRECISION[@BLOCK SIZE]")
    parser.add_argument("--checkpoints", type=Path, help="keep checkpoints here")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON; those of other sides stay")
    options = parser.parse_args()
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            scratch = Path(folder)
            exported, vocabulary = _export(name, (options.checkpoints or scratch) / name, scratch)
            figures = {}
            for kind in options.sides.split(","):
                side = _side(kind, exported, vocabulary, scratch / kind.replace(":", "-"))
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    figures[kind] = pool.apply(measure, (side,))
                Console(width=130).print(_table(name, figures))
        write_figures(options.output, {**circumstances(), "context": CONTEXT, "models": {name: figures}})


def measure(side: Side) -> dict[str, Any]:
    """Return the figures of `side`: MB that a step reads, GB/s, and milliseconds."""
    weights, bandwidth = weight_bytes(side.graph), read_bandwidth()
    cache = CONTEXT * sum(2 * heads * size for heads, size in side.geometry.layers)
    cache *= np.dtype(side.geometry.cache).itemsize
    executor, profile = (_openvino if side.is_openvino else _onnxruntime)(side)
    return {
        "weights_mb": weights / 1e6,
        "cache_mb": cache / 1e6,
        "bandwidth_gb_s": bandwidth,
        "limit_ms": (weights + cache) / bandwidth / 1e6,
        "step_ms": _step_ms(executor),
        "tokens_ms": {str(count): _step_ms(executor, count, np.arange(count)) for count in COUNTS},
        "pieces_ms": {str(count): _step_ms(executor, count) for count in PIECES},
        "rows_ms": _rows_ms(executor) if side.is_openvino else {},
        "loop_ms": _loop_ms(executor),
        "operators": profile(),
    }


def weight_bytes(graph: Graph) -> int:
    """Return the bytes of the constants that a step reads whole: all but tables of which it reads rows."""
    model = load_graph(graph.path).graph
    read = {name for node in model.node if node.op_type not in LOOKUPS for name in node.input}
    return sum(
        int(np.prod(tensor.dims)) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        for tensor in model.initializer
        if tensor.name in read
    )


def _export(name: str, checkpoint: Path, folder: Path) -> tuple[DecoderExport, int]:
    make_checkpoint(name, checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return export_decoder(model, folder, MAX_LENGTH), AutoConfig.from_pretrained(checkpoint).vocab_size


def _side(kind: str, exported: DecoderExport, vocabulary: int, folder: Path) -> Side:
    engine, _, rest = kind.rpartition(":")
    precision, _, block = rest.partition("@")
    cache: CacheType = "uint8" if engine else "float32"
    graph = (page_attention if engine else fuse)(exported.graph, folder)
    graph = quantise_weights(graph, precision, WeightOptions(int(block or 32), symmetric=True), folder).graph
    slots = max(rows for rows, _ in ROWS) if engine else 1
    return Side(kind, graph, geometry_of(exported.caches, slots, MAX_LENGTH, vocabulary, cache))


def _onnxruntime(side: Side) -> tuple[Executor, Profile]:
    def opened(profiled: Path | None) -> InPlace:
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads, settings.inter_op_num_threads = available_cores(), 1
        settings.enable_profiling = profiled is not None
        settings.profile_file_prefix = str(profiled)
        session = onnxruntime.InferenceSession(
            str(side.graph.path), settings, ["CPUExecutionProvider"], disabled_optimizers=list(SLOW_FUSIONS)
        )
        return InPlace(side.geometry, session)

    def profile() -> list[tuple[str, float]]:
        with tempfile.TemporaryDirectory() as folder:
            executor = opened(Path(folder) / "profile")
            _step_ms(executor)
            events = json.loads(Path(executor.session.end_profiling()).read_text("utf-8"))
        first = sorted(event["ts"] for event in events if event["name"] == "model_run")[-STEPS]
        spent: dict[str, float] = defaultdict(float)
        for event in events:
            if event["name"].endswith("_kernel_time") and event["ts"] >= first:
                spent[event["args"]["op_name"]] += event["dur"] / 1000 / STEPS
        return slowest(spent)

    return opened(None), profile


def _openvino(side: Side) -> tuple[Executor, Profile]:
    from builder.runtime.generation.executors.openvino import OpenVinoExecutor  # which imports OpenVINO

    def opened(**entries: str) -> OpenVinoExecutor:
        properties = {**decoder_properties(side.geometry.cache), **entries}
        session = Session(engine="openvino", threads=available_cores(), entries=properties)
        return OpenVinoExecutor(side.graph.path, side.geometry, session)

    def profile() -> list[tuple[str, float]]:
        executor = opened(PERF_COUNT="YES")
        for place in range(CONTEXT + STEPS):  # one token each, because OpenVINO's counts are averages over all calls
            executor.run(0, np.array([[5 + place]]), np.array([place]))
        spent: dict[str, float] = defaultdict(float)
        for node in executor.request.profiling_info:
            spent[node.node_type] += node.real_time.total_seconds() * 1000
        return slowest(spent)

    return opened(), profile


def _step_ms(executor: Executor, count: int = 1, logits_positions: np.ndarray | None = None) -> float:
    """Return the median time of a step of `count` tokens after `CONTEXT`, with logits of the last by default."""
    executor.run(0, np.arange(5, 5 + CONTEXT)[None], np.zeros(1, np.int64))
    times = []
    for index in range(STEPS):
        start = time.perf_counter()
        executor.run(0, np.arange(5 + index, 5 + index + count)[None], np.array([CONTEXT]), logits_positions)
        times.append(time.perf_counter() - start)
    return 1000 * median(times)


def _rows_ms(executor: Executor) -> dict[str, list[float]]:
    """Return the median times of steps of `ROWS` after `ROWS_CONTEXT`: split into rows of one token, and not split."""
    from builder.runtime.generation.executors import openvino as executors  # which imports OpenVINO

    for slot in range(executor.geometry.slots):
        executor.run(slot, np.arange(5 + slot, 5 + slot + ROWS_CONTEXT)[None], np.zeros(1, np.int64))
    times: dict[str, list[float]] = {}
    for rows, new in ROWS:
        tokens, lengths = np.arange(5, 5 + rows * new).reshape(rows, new), np.full(rows, ROWS_CONTEXT)
        for split in (executors.split_short_rows, lambda rows: rows):
            spent = []
            with replaced((executors, "split_short_rows", split)):
                for _ in range(STEPS):
                    start = time.perf_counter()
                    executor.run(0, tokens, lengths, np.arange(rows * new))
                    spent.append(time.perf_counter() - start)
            times.setdefault(f"{rows} x {new}", []).append(1000 * median(spent))
    return times


def _loop_ms(executor: Executor) -> float:
    """Return what the decode loop takes for a token besides the executor's calls."""
    inside = 0.0
    run = type(executor).run

    def timed(*arguments: Any) -> np.ndarray:
        nonlocal inside
        start = time.perf_counter()
        logits = run(executor, *arguments)
        inside += time.perf_counter() - start
        return logits

    executor.run = timed  # type: ignore[assignment, method-assign]
    executor.can_speculate = False  # random weights soon repeat themselves
    start = time.perf_counter()
    generate(executor, [range(5, 5 + CONTEXT)], ANSWER, CONTEXT)
    spent = time.perf_counter() - start - inside
    return 1000 * spent / ANSWER


def slowest(spent: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the six operators with most of `spent`, and the sum of the others.

    A list, because a later run replaces it in a file of figures; two runs may have other operators.
    """
    ordered = sorted(spent.items(), key=lambda entry: -entry[1])
    return [*ordered[:6], ("others", sum(ms for _, ms in ordered[6:]))]


def _table(name: str, figures: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title=f"{name}: one token after {CONTEXT}, ms", title_justify="left")
    for column in ("", "read, MB", "GB/s", "limit", "step", "of the limit", "loop", "operators"):
        table.add_column(column)
    for kind, one in figures.items():
        operators = ", ".join(f"{operator} {ms:.2f}" for operator, ms in one["operators"])
        read = one["weights_mb"] + one["cache_mb"]
        times = (one[key] for key in ("limit_ms", "step_ms"))
        share = f"{one['limit_ms'] / one['step_ms']:.0%}"
        cells = (f"{read:.0f}", f"{one['bandwidth_gb_s']:.1f}", *(f"{ms:.2f}" for ms in times), share)
        table.add_row(kind, *cells, f"{one['loop_ms']:.2f}", operators)
    return table


if __name__ == "__main__":
    main()
