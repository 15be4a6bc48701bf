"""Times of a generating model, in PyTorch and on its graphs: a prompt or a text, and a token of 1 or 8 rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import Cache, PreTrainedModel

from builder.building.variants.timing import ROUGH_SHARE, median_ms, pytorch_with, warm_ms
from builder.building.verify.generation import geometry_of
from builder.building.verify.seq2seq import Graphs
from builder.common.speed import Latencies
from builder.engines.decoding import Executors
from builder.runtime.contract import CacheType, LayerShape
from builder.runtime.generation.executors.base import Executor

ROWS = (1, 8)
CONTEXT = 64  # tokens before the one that is timed

Run = Callable[[], object]


def pytorch_decoder_latencies(model: PreTrainedModel, threads: int) -> Latencies:
    """Time a token of each number of rows after `CONTEXT` tokens, and a prompt of 128, as transformers runs them."""
    with pytorch_with(threads):
        context = torch.ones((1, CONTEXT), dtype=torch.long)
        past = model(input_ids=context, use_cache=True, logits_to_keep=1).past_key_values
        runs = {
            f"token, {rows} rows": _pytorch_step(model, rows, past_key_values=_repeated(past, rows)) for rows in ROWS
        }
        prompt = torch.ones((1, 2 * CONTEXT), dtype=torch.long)
        runs["prompt of 128"] = lambda: model(input_ids=prompt, use_cache=True, logits_to_keep=1)
        return _rough_latencies(runs)


def pytorch_seq2seq_latencies(model: PreTrainedModel, threads: int) -> Latencies:
    """Time a text of 128 tokens through the encoder, and the same tokens, as transformers runs them."""
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


def _repeated(past: Cache, rows: int) -> Cache:
    """Return a cache of `rows` rows, each as the one of `past`."""
    repeated = copy.deepcopy(past)
    repeated.batch_repeat_interleave(rows)
    return repeated


def _pytorch_step(model: PreTrainedModel, rows: int, **state: Any) -> Run:
    name = "decoder_input_ids" if "encoder_outputs" in state else "input_ids"
    inputs = {**state, name: torch.ones((rows, 1), dtype=torch.long)}
    return lambda: model(**inputs, use_cache=True)


def decoder_latencies(
    executors: Executors, caches: Sequence[LayerShape], vocabulary: int, cache: CacheType, choosing: bool
) -> Latencies:
    """Time these on a graph, in the emitted executor. `choosing`: whether a choice depends on it."""
    executor = executors(geometry_of(caches, max(ROWS), 4 * CONTEXT, vocabulary, cache))
    runs = {f"token, {rows} rows": _step(executor, rows) for rows in ROWS}
    prompt, nothing = np.ones((1, 2 * CONTEXT), np.int64), np.zeros(1, np.int64)
    runs["prompt of 128"] = lambda: executor.run(0, prompt, nothing)
    return _latencies(runs, choosing)


def seq2seq_latencies(graphs: Graphs, threads: int, choosing: bool) -> Latencies:
    """Time these on the graphs, in the emitted executor."""
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


def _rough_latencies(runs: Mapping[str, Run]) -> Latencies:
    """Return rough times. The first is run once before, since it may have to read the weights."""
    next(iter(runs.values()))()
    return {name: warm_ms(run, ROUGH_SHARE) for name, run in runs.items()}
