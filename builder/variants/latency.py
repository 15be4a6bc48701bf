"""Latency of one engine at a time, over a grid of batch sizes and lengths.

Engines are timed one after the other, each with the same threads, and none while another is open.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import torch

from builder.engines import Infer
from builder.export.rows import Rows
from builder.onnx.graph import Graph
from builder.speed import Latencies
from builder.tasks.base import TaskGraph
from builder.variants.timing import about_ms, median_ms, pytorch_with

BATCHES = (1, 8)
LENGTHS = (16, 64, 128)


def pytorch_latencies(module: TaskGraph, rows: Rows, max_length: int, threads: int) -> Latencies:
    """The module as transformers runs it, with its own attention."""
    with pytorch_with(threads):
        return _grid(
            module.inputs, rows, max_length, lambda feeds: module(*map(torch.from_numpy, feeds.values())), about_ms
        )


def engine_latencies(infer: Infer, graph: Graph, rows: Rows, max_length: int, choosing: bool) -> Latencies:
    """The graph in its engine, opened as `infer`. `choosing`: whether a choice hangs on it."""
    return _grid(graph.inputs, rows, max_length, infer, partial(median_ms, most=10) if choosing else about_ms)


def _grid(
    names: tuple[str, ...],
    rows: Rows,
    max_length: int,
    run: Callable[[dict[str, np.ndarray]], object],
    timed: Callable[[Callable[[], object]], float],
) -> Latencies:
    lengths = sorted({min(length, max_length) for length in LENGTHS})
    feeds = {f"{b}x{n}": rows.feeds(names, [n] * b) for b, n in product(BATCHES, lengths)}
    return {shape: timed(partial(run, feed)) for shape, feed in feeds.items()}
