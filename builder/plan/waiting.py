"""How long requests wait for batches that form by themselves: many of them, at random times, played through.

Whoever arrives while a batch runs is in the next one, which the front cuts into calls of texts of similar length, and
pads. That queue has no closed form for texts of unequal length, so 20,000 requests stand for it, always the same ones:
200 of them are slower than their p99. Of requests with several texts there are fewer.
"""

from __future__ import annotations

import math

import numpy as np

from builder.plan.speeds import Cost
from builder.runtime.contract import Batching
from builder.runtime.encoder.cutting import cut

TEXTS, LEAST_REQUESTS = 20_000, 2_000
HALVINGS = 60  # of the interval in which a scale lies


def latencies(cost: Cost, rate: float, texts: int, mean: float, longest: float, batching: Batching) -> np.ndarray:
    """Milliseconds of each request on one instance, which batches as its front is told.

    `rate`: requests a second, each of `texts` texts; `mean`, `longest`: their tokens.
    """
    came, tokens = _requests(rate, texts, mean, longest)
    most, count = max(1, batching.max_rows // texts), len(came)
    answered, at, free = np.empty(count), 0, 0.0
    while at < count:
        begun = max(free, came[at])
        end = min(at + most, int(np.searchsorted(came, begun, "right")))
        free = begun + batch_ms(cost, tokens[at * texts : end * texts], batching)
        answered[at:end], at = free, end
    return answered - came


def full_share(cost: Cost, rate: float, texts: int, mean: float, longest: float, batching: Batching) -> float:
    """The share of the time in which they come that the texts of the same requests take in full batches.

    Those waste the least: where the share is 1 or more, who comes later waits longer and longer (the queue is stable
    below 1: Neuts, 1967).
    """
    came, tokens = _requests(rate, texts, mean, longest)
    size = max(1, batching.max_rows // texts) * texts
    taken = sum(batch_ms(cost, tokens[at : at + size], batching) for at in range(0, len(tokens), size))
    return taken * rate / (1000 * len(came))


def _requests(rate: float, texts: int, mean: float, longest: float) -> tuple[np.ndarray, np.ndarray]:
    """When each request comes, in milliseconds, and the tokens of all texts, one request after the other."""
    chance, count = np.random.default_rng(0), max(LEAST_REQUESTS, TEXTS // texts)
    came = np.cumsum(chance.exponential(1000 / rate, count))
    return came, lengths(mean, longest, count * texts, chance)


def batch_ms(cost: Cost, tokens: np.ndarray, batching: Batching) -> float:
    """Milliseconds of a batch of texts of so many `tokens`: of its calls, padded to the longest text of each."""
    if len(tokens) == 1:
        return cost.of(float(tokens[0]))
    whole = np.ceil(tokens).astype(int).tolist()
    calls = cut(whole, batching.token_budget, batching.max_rows, batching.call_cost)
    return sum(cost.of(len(call) * max(whole[index] for index in call)) for call in calls)


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
