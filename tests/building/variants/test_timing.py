"""Timed runs, and which of them count."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from builder.building.variants import timing
from tests.decoders import make_decoder


class Clock:
    """Clock that each run advances by a number of seconds."""

    def __init__(self, runs: Iterator[float]) -> None:
        self.now, self.runs = 0.0, runs

    def run(self) -> None:
        self.now += next(self.runs)


@pytest.mark.parametrize(("seconds", "expected"), [((5.0, 2.0, 3.0), (2000, 3000)), ((0.5, 0.25, 0.75), (250, 750))])
def test_rough_time_of_a_token_excludes_the_first_run(
    monkeypatch: pytest.MonkeyPatch, seconds: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    """The first run also reads, for example, weights whose pages were released."""
    clock = Clock(iter(seconds))
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    assert tuple(timing._rough_latencies({"token, 1 rows": clock.run, "prompt of 128": clock.run}).values()) == expected


@pytest.mark.parametrize(
    ("engine", "runs"), [("onnxruntime", ["16", "16", "1024"]), ("openvino", ["16"] * 2 + ["1024"] * 2)]
)
def test_timing_excludes_the_preparation_for_a_shape(
    engine: str, runs: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "MIN_RUNS", 1)
    calls: list[str] = []
    monkeypatch.setattr(timing, "_feeds", lambda *shapes: {"1x16": {"x": np.zeros(16)}, "8x128": {"x": np.zeros(1024)}})
    graph: Any = SimpleNamespace(engine=engine, token_inputs=("x",))
    rows: Any = None

    def infer(feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        calls.append(str(feed["x"].size))
        return feed

    timing.engine_latencies(infer, graph, rows, 128, choosing=False)
    assert calls == runs


def test_rough_times_warm_up_once_with_the_smallest_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rough times decide nothing, and a warm-up of each shape took a third of their time."""
    monkeypatch.setattr(timing, "MIN_RUNS", 1)
    calls: list[str] = []
    times = timing._rough_latencies({shape: partial(calls.append, shape) for shape in ("1x16", "8x128")})
    assert calls == ["1x16", "1x16", "8x128"]
    assert list(times) == ["1x16", "8x128"]


@pytest.mark.parametrize(
    ("model_type", "tokens"), [("llama", 1), ("mamba2", 1), ("recurrent_gemma", 1), ("openai-gpt", timing.CONTEXT + 1)]
)
def test_pytorch_reads_a_token_or_the_text_as_its_cache_allows(
    model_type: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is given a cache by the model's own name for it; GPT, which has none, reads the whole text again."""
    model, steps = make_decoder(model_type), []
    monkeypatch.setattr(timing, "_rough_latencies", lambda runs: [run() for run in runs.values()])
    handle = model.register_forward_pre_hook(
        lambda module, arguments, inputs: steps.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    timing.pytorch_decoder_latencies(model, 1)
    handle.remove()
    assert steps[-1 - len(timing.ROWS) : -1] == [(rows, tokens) for rows in timing.ROWS]
