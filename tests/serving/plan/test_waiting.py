"""The simulated queue: known waiting times, and loads that only batches sustain."""

from __future__ import annotations

import math

import numpy as np
import pytest

from builder.runtime.contract import Batching
from builder.serving.plan.speeds import CallCost
from builder.serving.plan.waiting import batch_ms, full_share, latencies, lengths


def _together(rows: int) -> Batching:
    """Return one call for everything that fits into a batch."""
    return Batching(token_budget=1 << 30, max_rows=rows, call_cost=1 << 20)


def test_waits_of_single_requests_match_the_mm1_queue() -> None:
    """M/M/1 at half utilisation: latencies are exponentially distributed with mean 1 ms / (1 - 0.5)."""
    times = latencies(CallCost(0, 0.1), rate=500, texts=1, mean=10, longest=1e6, batching=_together(1))
    assert np.quantile(times, [0.5, 0.99]) == pytest.approx([2 * math.log(2), 2 * math.log(100)], rel=0.15)


@pytest.mark.parametrize(("busy", "call"), [(0.3, 0.0), (0.6, 0.0), (0.6, 4.0), (0.5, 10.0)])
def test_waits_match_the_pollaczek_khinchine_formula(busy: float, call: float) -> None:
    """M/G/1, and M/D/1 where a call costs the same for any text: the mean wait is rate * E[S^2] / (2 (1 - busy))."""
    cost = CallCost(call, 1 - call / 10)  # 10 ms for a text of 10 tokens, the average length
    rate = 100 * busy
    times = latencies(cost, rate, texts=1, mean=10, longest=1e6, batching=_together(1))
    service = 10 + cost.part * (np.random.default_rng(1).exponential(10, 1_000_000) - 10)
    wait = rate / 1000 * np.mean(service**2) / (2 * (1 - busy))
    assert times.mean() == pytest.approx(10 + wait, rel=0.1)


def test_requests_of_several_texts_wait_for_all_of_them() -> None:
    alone = latencies(CallCost(1, 0.1), rate=0.01, texts=3, mean=10, longest=10, batching=_together(3))
    assert alone == pytest.approx(np.full(len(alone), 4.0)), "1 ms and three texts of 1 ms"


def test_batches_sustain_more_than_single_requests() -> None:
    """Ten requests arrive during each call of 10 ms: each waits for at most one call and its own."""
    times = latencies(CallCost(10, 0), rate=1000, texts=1, mean=10, longest=100, batching=_together(64))
    assert 10 - 1e-6 < times.min() < times.max() < 20 + 1e-6
    few = latencies(CallCost(10, 0), rate=1000, texts=1, mean=10, longest=100, batching=_together(5))
    assert few.max() > 1000, "more come than go"


def test_full_share_detects_overload() -> None:
    """100 requests of two texts a second, in calls of 10 ms with one request or two."""
    for rows, share in ((2, 1.0), (3, 1.0), (4, 0.5)):
        assert full_share(CallCost(10, 0), 100, 2, 10, 10, Batching(1 << 30, rows, 1 << 20)) == pytest.approx(share)


def test_batch_ms_adds_calls_and_padding() -> None:
    """Texts of 10, 10 and 100 tokens: one call pads two of them to 100, two calls cost one call more."""
    tokens = np.array([10.0, 100.0, 10.0])
    assert batch_ms(CallCost(5, 0.1), tokens, Batching(2048, 8, 1000)) == pytest.approx(5 + 30)
    assert batch_ms(CallCost(5, 0.1), tokens, Batching(2048, 8, 50)) == pytest.approx(10 + 12)
    assert batch_ms(CallCost(5, 0.1), tokens, Batching(2048, 1, 1000)) == pytest.approx(15 + 12)


@pytest.mark.parametrize(("mean", "longest"), [(40, 256), (40, 41), (1, 10_000)])
def test_lengths_have_the_requested_mean_and_maximum(mean: float, longest: float) -> None:
    drawn = lengths(mean, longest, 50_000, np.random.default_rng(1))
    assert drawn.mean() == pytest.approx(mean, rel=0.02)
    assert drawn.max() <= longest


def test_lengths_are_constant_if_mean_equals_maximum() -> None:
    assert set(lengths(64, 64, 10, np.random.default_rng(1))) == {64.0}
