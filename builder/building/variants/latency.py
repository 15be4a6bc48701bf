"""Latency of one engine at a time, over a grid of batch sizes and lengths.

Engines are timed one after the other, each with the same threads, and none while another is open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import product

import numpy as np
import torch

from builder.building.variants.timing import CHOOSING_SHARE, ROUGH_SHARE, pytorch_with, warm_ms
from builder.checkpoints.tasks.base import TaskGraph
from builder.common.speed import Latencies
from builder.engines import Infer
from builder.engines.encoding import encoding_engine
from builder.graphs.export.rows import Rows
from builder.graphs.onnx.graph import Graph

BATCHES = (1, 8)
LENGTHS = (16, 64, 128)

Feed = dict[str, np.ndarray]


def pytorch_latencies(module: TaskGraph, rows: Rows, max_length: int, threads: int) -> Latencies:
    """Time the module as transformers runs it, with its own attention."""
    with pytorch_with(threads):
        return _rough_latencies(
            _feeds(module.inputs, rows, max_length), lambda feed: module(*map(torch.from_numpy, feed.values()))
        )


def engine_latencies(infer: Infer, graph: Graph, rows: Rows, max_length: int, choosing: bool) -> Latencies:
    """Time the graph in its engine, opened as `infer`. `choosing`: measure for longer, to compare it with others.

    Rough times are enough even then: variants near the fastest are measured again as they will be served. Each shape
    is run once before, since an engine may have to prepare itself for it.
    """
    feeds = _feeds(graph.inputs, rows, max_length)
    if not choosing and not encoding_engine(graph.engine).prepares_shapes:
        return _rough_latencies(feeds, infer)
    share = CHOOSING_SHARE if choosing else ROUGH_SHARE
    return {shape: _prepared_ms(partial(infer, feed), share) for shape, feed in feeds.items()}


def _prepared_ms(run: Callable[[], object], share: float) -> float:
    run()
    return warm_ms(run, share)


def _rough_latencies(feeds: Mapping[str, Feed], run: Callable[[Feed], object]) -> Latencies:
    """Return rougher times: long calls run once.

    Only the smallest shape is run once before: the others find the weights read.
    """
    run(next(iter(feeds.values())))
    return {shape: warm_ms(partial(run, feed), ROUGH_SHARE) for shape, feed in feeds.items()}


def _feeds(names: tuple[str, ...], rows: Rows, max_length: int) -> dict[str, Feed]:
    """Return the inputs by shape; the largest last."""
    lengths = sorted({min(length, max_length) for length in LENGTHS})
    return {f"{b}x{n}": rows.feeds(names, [n] * b) for b, n in product(BATCHES, lengths)}
