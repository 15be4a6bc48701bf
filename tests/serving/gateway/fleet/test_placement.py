"""Placement of models on servers: the same in every gateway, where memory is free, and away from full servers."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from builder.serving.gateway.fleet.placement import (
    COPY_IDLE_S,
    are_full,
    candidates_for,
    choose_copy,
    place,
    place_copy,
    ranked,
)
from builder.serving.gateway.fleet.routing import BATCHED_TOKENS

MODELS = [f"model{number}" for number in range(200)]


@dataclass(eq=False)
class Server:
    """A server whose least recently requested models are idle for `idle` seconds; by default memory is free."""

    name: str
    work: int = 0
    idle: float = math.inf
    requests: int = 0
    slowness: float = 1.0

    def idle_s(self, size: int) -> float:
        return self.idle


def servers() -> list[Server]:
    return [Server(f"10.0.0.{number}:8001") for number in range(5)]


def test_gateways_place_alike_and_evenly() -> None:
    """Place every model alike, in whatever order a gateway learned of the servers."""
    here, there = servers(), servers()[::-1]
    placed = [place(1, candidates_for(model, here)).name for model in MODELS]
    assert placed == [place(1, candidates_for(model, there)).name for model in MODELS]
    counts = Counter(placed)
    assert len(counts) == 5
    assert max(counts.values()) < 2 * len(MODELS) / 5


def test_model_goes_where_memory_is_free_or_models_are_idle_longest() -> None:
    first, second, third, *rest = ranked("model", servers())
    first.idle, second.idle = 10.0, math.inf
    assert place(1, candidates_for("model", [*rest, third, second, first])) is second
    second.idle, third.idle = 500.0, 400.0
    assert place(1, candidates_for("model", [*rest, third, second, first])) is second, "one of three candidates"


def test_full_server_is_passed_over() -> None:
    fleet = servers()
    first, second, *_ = ranked("model", fleet)
    first.work = 10 * BATCHED_TOKENS
    assert place(1, candidates_for("model", fleet)) is second


def test_server_that_leaves_moves_only_its_own_models() -> None:
    fleet = servers()
    before = {model: place(1, candidates_for(model, fleet)).name for model in MODELS}
    after = {model: place(1, candidates_for(model, fleet[1:])).name for model in MODELS}
    assert all(after[model] == name for model, name in before.items() if name != fleet[0].name)


def test_second_copy_needs_full_holders_and_idle_memory() -> None:
    fleet = servers()
    holder, *others = ranked("model", fleet)
    assert not are_full([holder], fleet)
    holder.work = 10 * BATCHED_TOKENS
    assert are_full([holder], fleet)
    assert place_copy("model", 1, {holder}, fleet) is others[0]
    assert place_copy("model", 1, {holder}, [holder]) is None
    assert place_copy("model", 1, {holder, others[0]}, fleet) is others[1], "the first one loads it already"
    for other in others:
        other.idle = COPY_IDLE_S / 2
    assert place_copy("model", 1, {holder}, fleet) is None, "it would take the place of models in use"
    for other in fleet:
        other.work = 10 * BATCHED_TOKENS
    assert not are_full([holder], fleet), "all servers are as full"


def test_idle_holders_leave_requests_to_the_first_choice() -> None:
    """So that a copy that is not needed becomes idle."""
    first, second, *_ = ranked("model", servers())
    assert choose_copy("model", 10, [second, first]) is first
    first.slowness = 1.9
    assert choose_copy("model", 10, [second, first]) is first, "it is idle and not much slower"
    first.slowness = 2.1
    assert choose_copy("model", 10, [second, first]) is second
    first.slowness, first.work, first.requests = 1.0, 10, 1
    assert choose_copy("model", 10, [second, first]) is second
    second.slowness = 3.0
    assert choose_copy("model", 10, [second, first]) is first
