"""Latency of one engine at a time, over a grid of batch sizes and lengths.

Engines are timed one after the other, each with the same threads, and none while another is open.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from builder.engines import infer_with
from builder.export.rows import Rows
from builder.onnx.graph import Graph
from builder.speed import Latencies
from builder.tasks.base import TaskGraph

BATCHES = (1, 8)
LENGTHS = (16, 64, 128)
ENOUGH_S = 0.1  # of runs of one shape


def pytorch_latencies(module: TaskGraph, rows: Rows, max_length: int, threads: int) -> Latencies:
    """The module as transformers runs it, with its own attention."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            return _grid(module.inputs, rows, max_length, lambda feeds: module(*map(torch.from_numpy, feeds.values())))
    finally:
        torch.set_num_threads(before)


def engine_latencies(graph: Graph, rows: Rows, max_length: int, threads: int, spinning: bool) -> Latencies:
    """The graph in its engine, with the threads and spinning it will be served with."""
    return _grid(graph.inputs, rows, max_length, infer_with(graph, threads, spinning))


def _grid(
    names: tuple[str, ...], rows: Rows, max_length: int, run: Callable[[dict[str, np.ndarray]], object]
) -> Latencies:
    lengths = sorted({min(length, max_length) for length in LENGTHS})
    return {f"{b}x{n}": _median(rows.feeds(names, [n] * b), run) for b in BATCHES for n in lengths}


def _median(feeds: dict[str, np.ndarray], run: Callable[[dict[str, np.ndarray]], object]) -> float:
    """Median of 3 to 10 runs after one to warm up, `ENOUGH_S` of them if they are short."""
    run(feeds)
    times: list[float] = []
    while len(times) < 3 or (len(times) < 10 and sum(times) < ENOUGH_S):
        start = time.perf_counter()
        run(feeds)
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1000
