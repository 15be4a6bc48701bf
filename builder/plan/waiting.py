"""How long requests wait for batches that form by themselves: many of them, at random times, played through.

Whoever arrives while a batch runs is in the next one. That queue has no closed form for texts of unequal length, so
20,000 requests stand for it, always the same ones: 200 of them are slower than their p99. A batch is one call of its
tokens here; what is served pads texts, and cuts a batch into calls (builder.runtime.encoder.cutting).
"""

from __future__ import annotations

import math

import numpy as np

from builder.plan.speeds import Cost

REQUESTS = 20_000
HALVINGS = 60  # of the interval in which a scale lies


def latencies(cost: Cost, rate: float, texts: int, mean: float, longest: float, most: int) -> np.ndarray:
    """Milliseconds of each request on one instance, which answers up to `most` of them together.

    `rate`: requests a second, each of `texts` texts; `mean`, `longest`: their tokens.
    """
    chance = np.random.default_rng(0)
    came = np.cumsum(chance.exponential(1000 / rate, REQUESTS))
    tokens = lengths(mean, longest, REQUESTS * texts, chance).reshape(REQUESTS, texts).sum(1)
    until = np.concatenate([[0.0], np.cumsum(tokens)])
    answered, at, free = np.empty(REQUESTS), 0, 0.0
    while at < REQUESTS:
        begun = max(free, came[at])
        end = min(at + most, int(np.searchsorted(came, begun, "right")))
        free = begun + cost.of(until[end] - until[at])
        answered[at:end], at = free, end
    return answered - came


def lengths(mean: float, longest: float, count: int, chance: np.random.Generator) -> np.ndarray:
    """Tokens of texts most of which are short: exponentially distributed, cut at `longest`, `mean` on average."""
    if mean >= longest:
        return np.full(count, float(longest))
    return np.minimum(chance.exponential(_scale(mean, longest), count), longest)


def _scale(mean: float, longest: float) -> float:
    """The scale of the exponential distribution whose mean, once it is cut at `longest`, is `mean`:
    scale * (1 - exp(-longest / scale))."""
    low, high = mean, mean * longest / (longest - mean) + longest
    while high * -math.expm1(-longest / high) < mean:
        high *= 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * -math.expm1(-longest / middle) < mean else (low, middle)
    return high
