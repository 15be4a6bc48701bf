"""Simulate how long requests at random times wait for batches that form by themselves.

A request that arrives while a batch runs joins the next one, which the front cuts into padded calls of texts of similar
length. That queue has no closed form for texts of unequal length, so 20,000 simulated requests, always the same ones,
estimate it: 200 of them are slower than their p99. With several texts per request there are fewer requests.
"""

from __future__ import annotations

import math

import numpy as np

from builder.runtime.contract import Batching
from builder.runtime.encoder.cutting import cut
from builder.serving.plan.speeds import CallCost

TEXTS, MIN_REQUESTS = 20_000, 2_000
BISECTIONS = 60  # of the interval that contains the scale


def latencies(cost: CallCost, rate: float, texts: int, mean: float, longest: float, batching: Batching) -> np.ndarray:
    """Return the milliseconds of each request on one instance, which batches with its front's settings.

    `rate`: requests a second, each of `texts` texts; `mean`, `longest`: their tokens.
    """
    arrivals, tokens = _requests(rate, texts, mean, longest)
    max_requests, count = max(1, batching.max_rows // texts), len(arrivals)
    answered, at, free = np.empty(count), 0, 0.0
    while at < count:
        started = max(free, arrivals[at])
        end = min(at + max_requests, int(np.searchsorted(arrivals, started, "right")))
        free = started + batch_ms(cost, tokens[at * texts : end * texts], batching)
        answered[at:end], at = free, end
    return answered - arrivals


def full_share(cost: CallCost, rate: float, texts: int, mean: float, longest: float, batching: Batching) -> float:
    """Return the share of the arrival time that the texts of the same requests take in full batches.

    Full batches waste the least. If the share is 1 or more, waits grow without bound (the queue is stable below 1:
    Neuts, 1967).
    """
    arrivals, tokens = _requests(rate, texts, mean, longest)
    size = max(1, batching.max_rows // texts) * texts
    used_ms = sum(batch_ms(cost, tokens[at : at + size], batching) for at in range(0, len(tokens), size))
    return used_ms * rate / (1000 * len(arrivals))


def _requests(rate: float, texts: int, mean: float, longest: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrival times of the requests in milliseconds, and the tokens of all texts in request order."""
    chance, count = np.random.default_rng(0), max(MIN_REQUESTS, TEXTS // texts)
    arrivals = np.cumsum(chance.exponential(1000 / rate, count))
    return arrivals, lengths(mean, longest, count * texts, chance)


def batch_ms(cost: CallCost, tokens: np.ndarray, batching: Batching) -> float:
    """Return the milliseconds of a batch of texts with `tokens` tokens: its calls, each padded to its longest text."""
    if len(tokens) == 1:
        return cost.ms(float(tokens[0]))
    whole = np.ceil(tokens).astype(int).tolist()
    return sum(cost.ms(len(call) * max(whole[index] for index in call)) for call in cut(whole, batching))


def lengths(mean: float, longest: float, count: int, chance: np.random.Generator) -> np.ndarray:
    """Return token counts of mostly short texts: exponentially distributed, cut at `longest`, `mean` on average."""
    if mean >= longest:
        return np.full(count, float(longest))
    return np.minimum(chance.exponential(_scale(mean, longest), count), longest)


def _scale(mean: float, longest: float) -> float:
    """Return the scale of the exponential distribution that, cut at `longest`, has the mean `mean`.

    The mean of the cut distribution is scale * (1 - exp(-longest / scale)).
    """
    low, high = mean, mean * longest / (longest - mean) + longest
    while high * -math.expm1(-longest / high) < mean:
        high *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * -math.expm1(-longest / middle) < mean else (low, middle)
    return high
