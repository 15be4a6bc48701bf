"""Time that beam search adds to a step of the model: `scripts/bench search --before REVISION`.

Random logits of real widths, searches of 4 beams, with and without a token that no answer may have (as OPUS-MT's
checkpoints say of padding). This checkout and `REVISION` by turns, each in a process of its own; between them ONNX
Runtime, which finds log-probabilities and the highest of them in a graph, on all cores. Then whole steps of `--models`,
as the emitted engine takes them (search_steps.py).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from rich.console import Console
from rich.table import Table

from builder.common.machine import available_cores
from scripts.benchmarks.circumstances import circumstances, write_figures
from scripts.benchmarks.search_side import BEAMS
from scripts.benchmarks.search_steps import whole_steps

ROOT = Path(__file__).parents[2]
SHAPES = ((32, 58_101), (32, 32_128), (4, 50_257))  # rows and vocabulary: OPUS-MT, T5, GPT-2
FORBIDDEN: Mapping[str, tuple[int, ...]] = {"": (), ", a token forbidden": (7,)}
HERE, GRAPH = "this checkout", "LogSoftmax, TopK in a graph"


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench search")
    parser.add_argument("--before", default="HEAD~1", help="the revision to compare with (default HEAD~1)")
    parser.add_argument("--turns", type=int, default=5, help="of each side (default 5)")
    parser.add_argument("--steps", type=int, default=48, help="of a turn (default 48)")
    parser.add_argument("--models", default="marian,t5-small", help="whose whole steps are measured; '' for none")
    parser.add_argument("--output", type=Path, help="write all figures here, as JSON")
    options = parser.parse_args()
    figures: dict[str, Any] = {**circumstances(), "beams": BEAMS, "ms": {}}
    with tempfile.TemporaryDirectory() as folder:
        sides = {options.before: _checked_out(options.before, Path(folder)), HERE: ROOT}
        for rows, vocabulary in SHAPES:
            for title, forbidden in FORBIDDEN.items():
                work = rows, vocabulary, options.steps, *forbidden
                figures["ms"][f"{rows} x {vocabulary}{title}"] = _by_turns(sides, work, options.turns)
    Console(width=110).print(_table("the search alone, ms a step, least and median", figures["ms"]))
    if options.models:
        figures["steps"] = {}
        for name in options.models.split(","):
            with tempfile.TemporaryDirectory() as scratch:
                figures["steps"] |= whole_steps(name, Path(scratch), FORBIDDEN, options.turns)
        Console(width=110).print(_table("whole steps, ms, least and median", figures["steps"]))
    if options.output:
        write_figures(options.output, figures)


def _checked_out(revision: str, folder: Path) -> Path:
    """Extract the package as it was at `revision` into `folder`."""
    archive = subprocess.run(["git", "archive", revision, "builder"], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
        packed.extractall(folder, filter="data")
    return folder


def _by_turns(sides: Mapping[str, Path], work: tuple[int, ...], turns: int) -> dict[str, dict[str, float]]:
    """Return the least and median of each side's steps in ms."""
    times: dict[str, list[float]] = {name: [] for name in (*sides, GRAPH)}
    graph = _graph(*work[:2])
    for _ in range(turns):
        for name, root in sides.items():
            times[name] += _side(root, work)
        times[GRAPH] += [graph() for _ in range(work[2])]
    return {name: {"least": min(taken), "median": float(np.median(taken))} for name, taken in times.items()}


def _side(root: Path, work: tuple[int, ...]) -> list[float]:
    command = [sys.executable, str(Path(__file__).with_name("search_side.py")), *map(str, work)]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    times: list[float] = json.loads(done.stdout)
    return times


def _graph(rows: int, vocabulary: int) -> Callable[[], float]:
    """Return a function that returns the milliseconds of one run over logits that lie in memory already."""
    count = helper.make_tensor("count", TensorProto.INT64, [1], [2 * BEAMS])
    nodes = [
        helper.make_node("LogSoftmax", ["logits"], ["logprobs"]),
        helper.make_node("TopK", ["logprobs", "count"], ["values", "tokens"]),
    ]
    outputs = [
        helper.make_tensor_value_info("values", TensorProto.FLOAT, [rows, 2 * BEAMS]),
        helper.make_tensor_value_info("tokens", TensorProto.INT64, [rows, 2 * BEAMS]),
    ]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [rows, vocabulary])
    graph = helper.make_graph(nodes, "search", [logits], outputs, [count])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 9
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = available_cores()
    options.add_session_config_entry("session.force_spinning_stop", "1")  # it does not spin while the others run
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = np.random.default_rng(0).normal(0, 3, (rows, vocabulary)).astype(np.float32)
    binding = session.io_binding()
    binding.bind_input("logits", "cpu", 0, np.float32, values.shape, values.ctypes.data)
    for output in outputs:
        binding.bind_output(output.name, "cpu")

    def run() -> float:
        np.add(values, 0, out=values)
        start = time.perf_counter()
        session.run_with_iobinding(binding)
        return 1000 * (time.perf_counter() - start)

    return run


def _table(title: str, figures: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    sides = list(next(iter(figures.values())))
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for side in sides:
        table.add_column(side, justify="right")
    for work, row in figures.items():
        table.add_row(work, *(f"{row[side]['least']:.2f}  {row[side]['median']:.2f}" for side in sides))
    return table


if __name__ == "__main__":
    main()
