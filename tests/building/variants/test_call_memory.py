"""Memory of an encoder's largest calls."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from builder.building.variants.call_memory import largest_shapes, measured_token_bytes
from builder.graphs.export.rows import Rows
from builder.runtime.contract import Batching

ROWS = Rows(before=(1,), after=(2,), ordinary=np.arange(10, 20), pad=0, types=1)
BATCHING = Batching(token_budget=2048, max_rows=64, call_cost=16)


class FakeEngine:
    """Engine that keeps the memory of its largest call, `token` bytes for each token, as an arena does."""

    def __init__(self, token: int) -> None:
        self.token, self.kept, self.calls = token, np.empty(0, np.uint8), list[tuple[int, ...]]()

    def __call__(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        ids = feed["input_ids"]
        self.calls.append(ids.shape)
        if ids.size * self.token > self.kept.size:
            self.kept = np.ones(ids.size * self.token, np.uint8)
        return {"logits": ids}


@pytest.mark.parametrize("token", [20_000, 50_000])
def test_bytes_of_a_token_are_those_that_the_engine_keeps(token: int) -> None:
    engine = FakeEngine(token)
    measured = measured_token_bytes(engine, ("input_ids",), ROWS, BATCHING, 512)
    assert engine.calls == [(1, 16), (64, 32), (4, 512)]
    assert measured == pytest.approx(token, rel=0.1)


def test_bytes_of_a_token_are_those_of_the_calls_that_the_rows_allow() -> None:
    few = Batching(token_budget=2048, max_rows=8, call_cost=16)
    assert measured_token_bytes(FakeEngine(50_000), ("input_ids",), ROWS, few, 128) == pytest.approx(50_000, rel=0.1)


@pytest.mark.parametrize(
    ("max_length", "shapes"),
    [
        (512, [(64, 32), (4, 512)]),
        (8192, [(64, 32), (1, 8192)]),
        (8, [(64, 8)]),
    ],
)
def test_largest_calls_have_many_short_rows_and_the_longest(max_length: int, shapes: list[tuple[int, int]]) -> None:
    assert largest_shapes(BATCHING, max_length) == shapes


def test_largest_calls_of_an_engine_with_buckets_are_its_buckets() -> None:
    buckets = ((1, 16), (8, 16), (1, 128), (4, 128))
    assert largest_shapes(Batching(512, 8, 16, buckets), 128) == [(8, 16), (4, 128)]
