"""Whole steps of searches, by the emitted engine over int8 graphs of a real size that are created as a build does.

Searches read all logits, or the most probable tokens that the graph finds, step by step by turns. Random weights, 8
searches of 4 beams.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForSeq2SeqLM

from builder.building.verify.emitted import PromptedRequest, answer
from builder.building.verify.seq2seq import Graphs
from builder.common.machine import available_cores
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.seq2seq import export_seq2seq
from builder.graphs.onnx.graph import Graph
from builder.graphs.onnx.searches import for_searches
from builder.options import WeightOptions
from builder.runtime.generation.executors.base import CallPart, ScoredCandidates
from builder.runtime.generation.executors.onnxruntime_seq2seq import CrossAttending
from builder.runtime.generation.options import RequestOptions
from builder.runtime.generation.processors import Rules
from scripts.benchmarks.search_side import BEAMS
from scripts.benchmarks.seq2seq import make_checkpoint

SEARCHES, SOURCE, ANSWER = 8, 16, 40  # of so many tokens each
MODEL, ALL, FEW = "the model alone", "all logits read", "the most probable tokens"


class Alternating:
    """Executor that lets searches read all logits and the most probable tokens by turns.

    It times the span between two calls of all rows: a step of the model, and the search's work on it.
    """

    def __init__(self, executor: CrossAttending) -> None:
        self.executor = executor
        self.times: dict[str, list[float]] = {title: [] for title in (MODEL, ALL, FEW)}
        self.last: tuple[str, float] | None = None
        run, likeliest = executor.run, executor.likeliest

        def all_read(*part: Any) -> np.ndarray:
            start = self._begin(ALL, len(part[1]))
            logits = run(*part)
            if self.last is not None:
                self.times[MODEL].append(_ms_since(start))
            return logits

        def few_read(part: CallPart, count: int) -> ScoredCandidates:
            self._begin(FEW, len(part.tokens))
            return likeliest(part, count)

        executor.run = all_read  # type: ignore[assignment, method-assign]
        executor.likeliest = few_read  # type: ignore[method-assign]

    def _begin(self, title: str, rows: int) -> float:
        if self.last is not None:
            self.times[self.last[0]].append(_ms_since(self.last[1]))
        now = time.perf_counter()
        self.last = (title, now) if rows == SEARCHES * BEAMS else None
        self.executor.has_likeliest = not self.executor.has_likeliest
        return now


def _ms_since(start: float) -> float:
    return 1000 * (time.perf_counter() - start)


def whole_steps(
    name: str, folder: Path, forbidden: Mapping[str, tuple[int, ...]], turns: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the least and median of each side's steps in ms, for `name` with each of the `forbidden` tokens."""
    graphs = _graphs(name, folder)
    return {f"{name}{title}": _by_turns(graphs, tokens, turns) for title, tokens in forbidden.items()}


def _by_turns(graphs: Graphs, forbidden: tuple[int, ...], turns: int) -> dict[str, dict[str, float]]:
    """Run turns that each read eight short texts and answer them."""
    executor = graphs.executor(SEARCHES * BEAMS, ANSWER + 1, SOURCE, available_cores())
    rules = Rules(
        RequestOptions(temperature=0.0, num_beams=BEAMS), (), tuple((token,) for token in forbidden), max_tokens=ANSWER
    )
    texts = np.random.default_rng(0).integers(5, 30_000, (SEARCHES, SOURCE)).tolist()
    prompted = [PromptedRequest((0,), rules, tuple(text)) for text in texts]
    alternating = Alternating(executor)
    for _ in range(turns):
        answer(executor, prompted, SEARCHES * SOURCE)
        alternating.last = None
    return {
        title: {"least": min(taken), "median": float(np.median(taken))} for title, taken in alternating.times.items()
    }


def _graphs(name: str, folder: Path) -> Graphs:
    model = AutoModelForSeq2SeqLM.from_pretrained(make_checkpoint(name, folder / name)).eval()
    exported = export_seq2seq(model, folder, BEAMS)
    encoder = _quantised(fuse(exported.encoder, folder), folder)
    decoder = _quantised(for_searches(fuse(exported.decoder, folder), BEAMS, folder), folder)
    return Graphs(encoder, decoder, exported.caches, exported.cross, BEAMS, int(model.config.vocab_size))


def _quantised(graph: Graph, folder: Path) -> Graph:
    return quantise_weights(graph, "int8", WeightOptions(block_size=32, symmetric=True), folder).graph
