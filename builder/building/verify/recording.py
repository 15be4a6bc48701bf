"""Recorded calls that this build's own engine answered, for another version of the engine to repeat.

Knows graphs and emitted executors; the engine's package repeats the calls, builder/engines/*/replay.py.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx

from builder.building.verify.replay import comparable
from builder.common.distribution import PACKAGE
from builder.engines import graph_engine, infer_with
from builder.engines.decoding import session_here
from builder.graphs.onnx.graph import Graph, nodes_of
from builder.runtime.generation.executors.base import CallPart, Executor
from builder.runtime.generation.executors.onnxruntime_seq2seq import CrossAttending

RECORDED = ("run", "likeliest", "draft", "copy", "encode", "attach", "assign")  # of an executor
TOLERANCE = 1e-4  # of the largest value, between two versions that compute in fp32
ROUNDED = 3e-2  # where values are rounded to 16, 8 or 4 bits on the way: another last digit may round differently
# If an encoder rounds activations to 8 bits, a last digit that rounds differently affects all layers. MiniLM in
# int8 is 0.12 away from fp32, by the norms of its answers, and 1.28's answers up to 0.09 from 1.31's, as near to fp32.
ROUNDED_ACTIVATIONS = 0.2
ROUNDS_ACTIVATIONS = ("DynamicQuantizeLinear", "QuantizeLinear", "DynamicQuantizeMatMul", "MatMulInteger")
ROUNDING = (*ROUNDS_ACTIVATIONS, "MatMulNBits", "DequantizeLinear")
STEPS = 6  # tokens after each row
LIKELIEST_TOKENS = 16  # of the most probable tokens of each row
LONG_ROW_TOKENS = 48  # tokens of a row that comes in pieces, unless a window needs more
MAX_PIECES, MIN_PIECE_TOKENS = 8, 16


@dataclass(frozen=True)
class Case:
    """Calls of this build and the answers of its own engine; replay.py reads `job`."""

    name: str
    job: Mapping[str, Any]
    answers: Sequence[Any]
    tolerance: float
    by_norm: bool = False  # True if `tolerance` is a share of the norm of an answer, not of its largest value


def graph_case(graph: Graph, feeds: Sequence[Mapping[str, np.ndarray]], threads: int) -> Case:
    """Record each call of `feeds` as it is, and its first row alone."""
    calls = [dict(call) for call in feeds]
    calls += [
        {name: values[:1] for name, values in call.items()} for call in feeds if len(next(iter(call.values()))) > 1
    ]
    infer = infer_with(graph, threads)
    job = {
        "way": "graph",
        "opener": str(graph_engine(graph.engine).replay_file),
        "model": str(graph.path),
        "arithmetic": graph.arithmetic,
        "outputs": list(graph.outputs),
        "threads": threads,
        "calls": calls,
    }
    answers = [{name: np.array(values) for name, values in infer(call).items()} for call in calls]
    if any(graph.operators[name] for name in ROUNDS_ACTIVATIONS):
        return Case(graph.path.name, job, answers, ROUNDED_ACTIVATIONS, by_norm=True)
    return Case(graph.path.name, job, answers, tolerance(graph))


def tolerance(graph: Graph) -> float:
    """Return how far two versions may be apart, as a share of the largest value."""
    if graph.arithmetic != "fp32" or any(graph.operators[name] for name in ROUNDING):
        return ROUNDED
    return ROUNDED if graph_engine(graph.engine).half_constants(graph) else TOLERANCE


class Recorder:
    """Recorder of an executor's calls and answers, in order, from its creation on."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.calls: list[tuple[str, Any]] = []
        self.answers: list[Any] = []
        for name in RECORDED:
            if hasattr(executor, name):
                setattr(executor, name, self._recording(name, getattr(executor, name)))

    def _recording(self, name: str, method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            # The process that repeats the calls knows no class of the builder: replay.py makes it of its own.
            plain = (tuple(value) if isinstance(value, CallPart) else value for value in arguments)
            self.calls.append((name, copy.deepcopy(tuple(plain))))
            answer = method(*arguments)
            self.answers.append(comparable(name, answer, self.executor.geometry.vocabulary))
            return answer

        return call

    def case(self, name: str, graphs: Sequence[Graph], threads: int, remote: bool = False) -> Case:
        """Return the case of an executor of the same arena over `graphs`; `remote`: its steps are calls of the engine.

        The recording ends here: the executor has its own methods again, and its weights are freed with it.
        """
        executor = self.executor
        for method in RECORDED:
            vars(executor).pop(method, None)
        cross = asdict(executor.texts.cross) if isinstance(executor, CrossAttending) else None
        job = {
            "way": "loop",
            "builder": str(PACKAGE),
            "opener": str(graph_engine(graphs[0].engine).replay_file),
            "remote": remote,
            "session": asdict(session_here(graphs[0].engine, executor.geometry.cache, threads)),
            "models": [str(graph.path) for graph in graphs],
            "geometry": asdict(executor.geometry),
            "cross": cross,
            "draft": executor.reads_hidden_states,
            "threads": threads,
            "calls": self.calls,
        }
        return Case(name, job, self.answers, max(map(tolerance, graphs)))


def drive(executor: Executor, prompts: Sequence[Sequence[int]], long: Sequence[int]) -> None:
    """Have `executor` do all that it does when it serves: `long` in pieces, `prompts` whole, then all of them at once.

    The calls request the first token's logits of each piece as well as the last's, and, for one step, the outputs that
    searches read. It has a slot for each prompt and the long row, and memory for `STEPS` more tokens in it.
    """
    rows = [list(long), *map(list, prompts)]
    piece = max(MIN_PIECE_TOKENS, -(-len(long) // MAX_PIECES))
    tokens = np.zeros((len(rows), 1), np.int64)
    for start in range(0, len(long), piece):
        part = np.array([rows[0][start : start + piece]], np.int64)
        ends = np.array([0, part.shape[1] - 1])
        tokens[0] = executor.run(0, part, np.array([start], np.int64), ends)[-1].argmax()
    for slot, row in enumerate(rows[1:], 1):
        tokens[slot] = executor.run(slot, np.array([row], np.int64), np.zeros(1, np.int64)).argmax()
    lengths = np.array([len(row) for row in rows], np.int64)
    for _ in range(STEPS - executor.has_likeliest):
        tokens = executor.run(0, tokens, lengths).argmax(axis=-1)[:, None]
        lengths = lengths + 1
    if executor.has_likeliest:
        executor.likeliest(CallPart(0, tokens, lengths), LIKELIEST_TOKENS)


def past_the_window(graph: Graph, tokens: Sequence[int], max_length: int) -> list[int]:
    """Return `tokens`, repeated past the longest attention window as far as `max_length` allows."""
    model = onnx.load(str(graph.path), load_external_data=False)
    windows = [a.i for n in nodes_of(model.graph) for a in n.attribute if a.name == "local_window_size" and a.i > 0]
    count = max(2, min(max([LONG_ROW_TOKENS, *(window + MIN_PIECE_TOKENS for window in windows)]), max_length - STEPS))
    return (list(tokens) * (1 + count // len(tokens)))[:count]
