"""Traffic measurements: all engines get the same requests in turn, with different batches in each round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from builder.building.variants import traffic
from builder.building.variants.traffic import (
    CLIENTS,
    MAX_ROUNDS,
    MIN_ROUNDS,
    REQUESTS,
    Rates,
    fastest,
    measure,
    settled,
)
from builder.runtime.encoder.pipeline import Answer, Pipeline
from builder.runtime.fields import Tensors


def test_traffic_engines_take_turns_over_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "MAX_MEASURED_S", 0.0)
    monkeypatch.setattr(traffic, "LOSING_SHARE", 0.0)
    seen: list[tuple[str, list[int]]] = []

    class Front(Pipeline):
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, requests: Sequence[Tensors]) -> list[Answer]:
            seen.append((self.name, [int(request["number"]) for request in requests]))
            return []

    requests = [{"number": np.array(number)} for number in range(20)]
    rates = measure({name: Front(name) for name in ("one", "two")}, requests)
    assert list(rates) == ["one", "two"]
    batches = [[batch for who, batch in seen if who == name] for name in rates]
    assert batches[0] == batches[1]
    assert {len(batch) for batch in batches[0][1:]} == set(CLIENTS)
    assert all(len(figures) == MIN_ROUNDS for figures in rates["one"].by_clients.values())
    many = [tuple(batch) for batch in batches[0][1:] if len(batch) > 1]
    assert len(many) == len(set(many)) == MIN_ROUNDS * REQUESTS // CLIENTS[1], "no batch comes twice"
    turns = [who for who, _ in seen[2:]]
    assert turns[0] == "one"
    assert turns[REQUESTS] == "two"


def test_traffic_ends_when_one_is_faster_by_more_than_noise() -> None:
    slow, fast = Rates({1: (10.0, 10.5, 10.0)}), Rates({1: (12.0, 12.5, 12.0)})
    assert settled({"slow": slow, "fast": fast})
    near, equal = Rates({1: (11.0, 11.5, 11.0)}), Rates({1: (11.0, 12.6, 11.0)})
    assert not settled({"slow": slow, "fast": fast, "near": near}), "near the fastest, and slower in every round"
    assert settled({"slow": slow, "fast": fast, "equal": equal}), "near the fastest, and faster in a round"
    assert not settled({"slow": slow, "fast": Rates({1: (12.0, 10.4, 12.0)})}), "not in every round"


class Clock:
    """Clock that fronts advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def front(self, seconds: float) -> Callable[[Sequence[int]], object]:
        """Return a front that takes `seconds` for each request."""

        def answer(requests: Sequence[int]) -> None:
            self.now += seconds * len(requests)

        return answer


def rounds_of(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> dict[str, int]:
    """Return the number of rounds by front, given the seconds that each takes per request."""
    clock = Clock()
    monkeypatch.setattr(traffic, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(traffic, "MAX_MEASURED_S", 1e9)
    rates = measure({name: clock.front(each) for name, each in seconds.items()}, range(20))
    assert seconds[fastest(rates)] == min(seconds.values())
    return {name: len(one.rounds) for name, one in rates.items()}


def test_traffic_drops_clearly_slower_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = rounds_of(monkeypatch, slow=2.0, fast=1.0, near=1.05)
    assert rounds == {"slow": 2, "fast": MAX_ROUNDS, "near": MAX_ROUNDS}
    assert rounds_of(monkeypatch, slow=2.0, fast=1.0, slower=1.2) == {"slow": 2, "fast": MIN_ROUNDS, "slower": 3}
    assert rounds_of(monkeypatch, slow=2.0, fast=1.0) == {"slow": 2, "fast": 2}


def test_traffic_fastest_was_measured_to_the_end() -> None:
    """Rounds of the others may have run while the machine was idle."""
    assert fastest({"losing": Rates({1: (20.0, 20.0)}), "one": Rates({1: (40.0, 9.0, 9.0)})}) == "one"


def test_rates_are_compared_and_described() -> None:
    steady, faster = Rates({1: (10.0, 10.0, 10.0)}), Rates({1: (10.1, 12.0, 10.5)})
    unsure = Rates({1: (9.0, 30.0, 20.0), 16: (9.0, 30.0, 20.0)})
    assert not steady.equals(faster), "slower in every round"
    assert Rates({1: (10.2, 11.0, 10.0)}).equals(faster), "not in every one"
    assert not steady.equals(unsure), "by too much"
    assert steady.spread == 0
    assert unsure.spread == pytest.approx(1.05)
    assert unsure.typical == pytest.approx(20)
    assert str(unsure) == "20 (9 to 30) and 20 (9 to 30)"
