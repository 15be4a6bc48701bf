"""Traffic: the same requests to every engine in turn, other batches in every round, and what the figures say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from builder.runtime.encoder.pipeline import Answer, Pipeline
from builder.runtime.fields import Tensors
from builder.variants.traffic import CLIENTS, LEAST_ROUNDS, REQUESTS, Rates, measure, settled


def test_engines_take_turns_over_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.variants.traffic.ENOUGH_S", 0.0)
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
    assert all(len(figures) == LEAST_ROUNDS for figures in rates["one"].by_clients.values())
    many = [tuple(batch) for batch in batches[0][1:] if len(batch) > 1]
    assert len(many) == len(set(many)) == LEAST_ROUNDS * REQUESTS // CLIENTS[1], "no batch comes twice"
    turns = [who for who, _ in seen[2:]]
    assert turns[0] == "one"
    assert turns[REQUESTS] == "two"


def test_rounds_end_where_one_is_faster_by_more_than_noise() -> None:
    slow, fast = Rates({1: (10.0, 10.5, 10.0)}), Rates({1: (12.0, 12.5, 12.0)})
    assert settled([slow, fast])
    assert not settled([slow, fast, Rates({1: (11.0, 11.5, 11.0)})]), "near the fastest"
    assert not settled([slow, Rates({1: (12.0, 10.4, 12.0)})]), "not in every round"


def test_what_the_figures_say() -> None:
    steady, faster = Rates({1: (10.0, 10.0, 10.0)}), Rates({1: (10.1, 12.0, 10.5)})
    unsure = Rates({1: (9.0, 30.0, 20.0), 16: (9.0, 30.0, 20.0)})
    assert not steady.equals(faster), "slower in every round"
    assert Rates({1: (10.2, 11.0, 10.0)}).equals(faster), "not in every one"
    assert not steady.equals(unsure), "by too much"
    assert steady.spread == 0
    assert unsure.spread == pytest.approx(1.05)
    assert unsure.typical == pytest.approx(20)
    assert str(unsure) == "20 (9 to 30) and 20 (9 to 30)"
