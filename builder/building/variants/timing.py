"""Times of PyTorch and of graphs: an encoder's calls by shape, a generating model's prompt and token.

Engines are timed one after the other, each with the same threads, and none while another is open. `CpuWaitMeter` shows
whether other programs used the cores meanwhile.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from builder.building.verify.generation import geometry_of
from builder.building.verify.seq2seq import Graphs
from builder.checkpoints.tasks.base import TaskGraph
from builder.common.speed import Latencies
from builder.engines import Infer
from builder.engines.decoding import Executors
from builder.engines.encoding import encoding_engine
from builder.graphs.export.caches import cache_argument
from builder.graphs.export.rows import Rows
from builder.graphs.onnx.graph import Graph
from builder.runtime.contract import CacheType, LayerShape
from builder.runtime.generation.executors.base import Executor

BATCHES, LENGTHS = (1, 8), (16, 64, 128)  # of an encoder's calls
ROWS = (1, 8)  # of a generating model's step
CONTEXT = 64  # tokens before the one that is timed

MEASURED_S = 0.3  # time of the repeated runs
CHOOSING_SHARE, ROUGH_SHARE = 1 / 3, 0.1  # shares of that time: if a variant is chosen by the result, and if not
WARM_UP_RUNS, MIN_RUNS, MAX_RUNS = 2, 3, 20
LONG_RUN_S = 1.0  # beside a run this long, the extra work of a first run is small
# Linux counts for each thread how long it ran and how long it could have run but waited, by the kernel's
# Documentation/scheduler/sched-stats.rst; elsewhere the wait is unknown.
TASKS = Path("/proc/self/task")
BUSY_SHARE = 0.2  # of the time that threads could run: a larger share is caused by other processes

Run = Callable[[], object]


def median_ms(run: Run) -> float:
    """Return the median of `MIN_RUNS` to `MAX_RUNS` runs after `WARM_UP_RUNS` more, in milliseconds.

    One long run is enough to warm up; short runs are repeated for `MEASURED_S`.
    """
    for _ in range(WARM_UP_RUNS):
        if _seconds(run) > LONG_RUN_S:
            break
    times: list[float] = []
    while len(times) < MIN_RUNS or (len(times) < MAX_RUNS and sum(times) < MEASURED_S):
        times.append(_seconds(run))
    return float(np.median(times)) * 1000


def warm_ms(run: Run, share: float) -> float:
    """Return a rougher median of a warm run, in `share` of the time that `median_ms` takes.

    It is enough for PyTorch, which is only compared with, for a build that has nothing to choose, and for encoders,
    whose fastest variants are measured again as they will be served.
    """
    times: list[float] = []
    while not times or (len(times) < MIN_RUNS and sum(times) < share * MEASURED_S):
        times.append(_seconds(run))
    return float(np.median(times)) * 1000


def _seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@contextmanager
def pytorch_with(threads: int) -> Iterator[None]:
    """Run PyTorch with this number of threads, and without gradients."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)


def pytorch_latencies(module: TaskGraph, rows: Rows, max_length: int, threads: int) -> Latencies:
    """Time the module as transformers runs it, with its own attention."""
    feeds = _feeds(module.inputs, rows, max_length)
    with pytorch_with(threads):
        return _rough_latencies(
            {shape: partial(module, *map(torch.from_numpy, feed.values())) for shape, feed in feeds.items()}
        )


def engine_latencies(infer: Infer, graph: Graph, rows: Rows, max_length: int, choosing: bool) -> Latencies:
    """Time the graph in its engine, opened as `infer`. `choosing`: measure for longer, to compare it with others.

    Rough times are enough even then: variants near the fastest are measured again as they will be served. Each shape
    is run once before, since an engine may have to prepare itself for it.
    """
    runs = {shape: partial(infer, feed) for shape, feed in _feeds(graph.token_inputs, rows, max_length).items()}
    if not choosing and not encoding_engine(graph.engine).prepares_shapes:
        return _rough_latencies(runs)
    latencies = {}
    for shape, run in runs.items():
        run()
        latencies[shape] = warm_ms(run, CHOOSING_SHARE if choosing else ROUGH_SHARE)
    return latencies


def _feeds(names: tuple[str, ...], rows: Rows, max_length: int) -> dict[str, dict[str, np.ndarray]]:
    """Return the inputs by shape; the largest last."""
    lengths = sorted({min(length, max_length) for length in LENGTHS})
    return {f"{b}x{n}": rows.feeds(names, [n] * b) for b, n in product(BATCHES, lengths)}


def _rough_latencies(runs: Mapping[str, Run]) -> Latencies:
    """Return rougher times: long calls run once.

    The first is run once before, since it may have to read the weights; the others find them read.
    """
    next(iter(runs.values()))()
    return {name: warm_ms(run, ROUGH_SHARE) for name, run in runs.items()}


def pytorch_decoder_latencies(model: PreTrainedModel, threads: int) -> Latencies:
    """Time a token of each number of rows after `CONTEXT` tokens, and a prompt of 128, as transformers runs them."""
    with pytorch_with(threads):
        name, past = cache_argument(model), _pytorch_context(model)
        runs = {
            f"token, {rows} rows": _pytorch_step(model, rows, **({name: _repeated(past, rows)} if past else {}))
            for rows in ROWS
        }
        prompt = torch.ones((1, 2 * CONTEXT), dtype=torch.long)
        runs["prompt of 128"] = lambda: model(input_ids=prompt, use_cache=True, logits_to_keep=1)
        return _rough_latencies(runs)


def pytorch_seq2seq_latencies(model: PreTrainedModel, threads: int) -> Latencies:
    """Time a text of 128 tokens through the encoder, and a token of each number of rows, as transformers runs them."""
    with pytorch_with(threads):
        ids = torch.ones((1, 2 * CONTEXT), dtype=torch.long)
        runs: dict[str, Run] = {"text of 128": lambda: model.get_encoder()(input_ids=ids)}
        text = model.get_encoder()(input_ids=ids).last_hidden_state
        context = torch.ones((1, CONTEXT), dtype=torch.long)
        past = model(encoder_outputs=(text,), decoder_input_ids=context, use_cache=True).past_key_values
        for rows in ROWS:
            state = {"encoder_outputs": (text.repeat(rows, 1, 1),), "past_key_values": _repeated(past, rows)}
            runs[f"token, {rows} rows"] = _pytorch_step(model, rows, **state)
        return _rough_latencies(runs)


def _pytorch_context(model: PreTrainedModel) -> Cache | None:
    """Return the cache after `CONTEXT` tokens; None for a model without one, which reads the text for each token."""
    context, name = torch.ones((1, CONTEXT), dtype=torch.long), cache_argument(model)
    past: Cache | None = getattr(model(input_ids=context, use_cache=True, logits_to_keep=1), name, None)
    if past is None and name in inspect.signature(model.forward).parameters:  # it fills a cache, and does not return it
        past = DynamicCache(config=model.config)
        model(input_ids=context, use_cache=True, logits_to_keep=1, **{name: past})
    return past


def _repeated(past: Cache, rows: int) -> Cache:
    """Return a cache of `rows` rows, each as the one of `past`."""
    repeated = copy.deepcopy(past)
    repeated.reorder_cache(torch.zeros(rows, dtype=torch.long))
    return repeated


def _pytorch_step(model: PreTrainedModel, rows: int, **state: Any) -> Run:
    name = "decoder_input_ids" if "encoder_outputs" in state else "input_ids"
    inputs = {**state, name: torch.ones((rows, 1 if state else CONTEXT + 1), dtype=torch.long)}
    return lambda: model(**inputs, use_cache=True)


def decoder_latencies(
    executors: Executors, caches: Sequence[LayerShape], vocabulary: int, cache: CacheType, choosing: bool
) -> Latencies:
    """Time a decoder's token of each number of rows, and a prompt of 128, on a graph, in the emitted executor.

    `choosing`: measure for longer, to compare it with others.
    """
    executor = executors(geometry_of(caches, max(ROWS), 4 * CONTEXT, vocabulary, cache))
    runs = {f"token, {rows} rows": _step(executor, rows) for rows in ROWS}
    prompt, nothing = np.ones((1, 2 * CONTEXT), np.int64), np.zeros(1, np.int64)
    runs["prompt of 128"] = lambda: executor.run(0, prompt, nothing)
    return _latencies(runs, choosing)


def seq2seq_latencies(graphs: Graphs, threads: int, choosing: bool) -> Latencies:
    """Time a text of 128 tokens through the encoder, and a token of each number of rows, in the emitted executor.

    `choosing`: measure for longer, to compare it with others.
    """
    executor = graphs.executor(max(ROWS), 4 * CONTEXT, 2 * CONTEXT, threads)
    text = [1] * (2 * CONTEXT)
    (encoded,) = executor.encode([text])
    for row in range(max(ROWS)):
        executor.attach(row, encoded)
        executor.assign(row, row, 0)
    runs: dict[str, Run] = {"text of 128": lambda: executor.encode([text])}
    return _latencies({**runs, **{f"token, {rows} rows": _step(executor, rows) for rows in ROWS}}, choosing)


def _step(executor: Executor, rows: int) -> Run:
    tokens, lengths = np.ones((rows, 1), np.int64), np.full(rows, CONTEXT)
    return lambda: executor.run(0, tokens, lengths)


def _latencies(runs: Mapping[str, Run], choosing: bool) -> Latencies:
    return {name: median_ms(run) for name, run in runs.items()} if choosing else _rough_latencies(runs)


class CpuWaitMeter:
    """Meter of the time that this process's threads wait for a core, from now on."""

    def __init__(self) -> None:
        self.start = _times()

    @property
    def share(self) -> float:
        """Share of their runnable time that this process's threads waited for a core, 0 to 1."""
        ran, waited = (max(0, now - then) for now, then in zip(_times(), self.start, strict=True))
        return waited / (ran + waited) if ran + waited else 0.0


def _times() -> tuple[int, int]:
    """Return the nanoseconds that the threads ran, and that they waited."""
    ran = waited = 0
    for file in TASKS.glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has just ended
            numbers = file.read_text().split()
            ran, waited = ran + int(numbers[0]), waited + int(numbers[1])
    return ran, waited
