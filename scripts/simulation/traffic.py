"""Models by Zipf's law, half of them decoders, their requests, and the servers that have them loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from math import ceil
from random import Random

from tritonclient.grpc import service_pb2

from builder.runtime.fields import Field
from builder.serving.gateway.fleet.request_work import BYTES_PER_TOKEN
from builder.serving.gateway.tensors import add_tensor
from scripts.simulation.servers import (
    ENCODE_TOKENS_PER_S,
    READ_TOKENS_PER_S,
    SHARED_TOKENS,
    WRITE_TOKENS_PER_S,
)

ENCODED = (16, 512)  # tokens of a text, uniformly
OWN = (16, 512)  # tokens of a prompt after its beginning, uniformly
WRITTEN = (16, 256)  # tokens of an answer, uniformly
BEGINNINGS = 50  # of the prompts of each decoder, which follow Zipf's law too
MIN_COPIES = 2
SPARE = 1.5  # copies of a model, as a multiple of the servers that its requests keep busy
TEXT, LENGTH = Field("text_input", "TYPE_STRING"), Field("max_tokens", "TYPE_INT32")


@dataclass(frozen=True)
class Call:
    """A request as a client sends it. `beginning`: what its prompt begins with; empty for an encoder's text."""

    request: service_pb2.ModelInferRequest
    beginning: str = ""


class Traffic:
    """Requests to `models` models, the first one most often. Models with an odd number are decoders."""

    def __init__(self, models: int, zipf: float, random: Random) -> None:
        self.random = random
        self.models = range(models)
        weights = _zipf(models, zipf)
        total = sum(weights)
        self.shares = [weight / total for weight in weights]
        self.cumulated = list(accumulate(weights))
        self.beginnings = list(accumulate(_zipf(BEGINNINGS, 1.0)))

    def slot_seconds(self, model: int) -> float:
        """Return the mean seconds that a request keeps a slot, if nothing is cached."""
        if not model % 2:
            return _mean(ENCODED) / ENCODE_TOKENS_PER_S
        return (SHARED_TOKENS + _mean(OWN)) / READ_TOKENS_PER_S + _mean(WRITTEN) / WRITE_TOKENS_PER_S

    def mean_slot_seconds(self) -> float:
        return sum(share * self.slot_seconds(model) for model, share in zip(self.models, self.shares, strict=True))

    def next_call(self) -> Call:
        """Return a request to a random model."""
        (model,) = self.random.choices(self.models, cum_weights=self.cumulated)
        request = service_pb2.ModelInferRequest(model_name=str(model))
        if not model % 2:
            add_tensor(request, TEXT, ["x" * BYTES_PER_TOKEN * self.random.randint(*ENCODED)], (1, 1))
            return Call(request)
        (number,) = self.random.choices(range(BEGINNINGS), cum_weights=self.beginnings)
        beginning = f"{model}/{number}"
        tokens = SHARED_TOKENS + self.random.randint(*OWN)
        add_tensor(request, TEXT, [beginning.ljust(BYTES_PER_TOKEN * tokens)], (1,))
        add_tensor(request, LENGTH, [self.random.randint(*WRITTEN)], (1,))
        return Call(request, beginning)

    def place(self, servers: int) -> list[list[str]]:
        """Return the models of each server: copies by popularity, each where the least load is expected so far."""
        loads = [share * self.slot_seconds(model) for model, share in zip(self.models, self.shares, strict=True)]
        total = sum(loads)
        placed: list[list[str]] = [[] for _ in range(servers)]
        expected = [(0.0, server) for server in range(servers)]
        for model in self.models:
            copies = max(MIN_COPIES, ceil(SPARE * servers * loads[model] / total))
            chosen = [heappop(expected) for _ in range(min(copies, servers))]
            for load, server in chosen:
                placed[server].append(str(model))
                heappush(expected, (load + loads[model] / len(chosen), server))
        return placed


def _zipf(count: int, exponent: float) -> list[float]:
    return [rank**-exponent for rank in range(1, count + 1)]


def _mean(limits: Sequence[int]) -> float:
    return sum(limits) / 2
