"""Requests a second that the emitted front answers over an engine: what clients see, less the transport.

Traffic is the samples in random order: one at a time, as one client sends them, and several at once, as many do. No two
rounds have the same batches, so an engine that has to prepare for each new shape pays for that here as it does in
service. Engines take turns, so that other load on the machine affects all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Request = TypeVar("Request")

CLIENTS = (1, 16)
REQUESTS = 32  # of one round and number of clients
MIN_ROUNDS, MAX_ROUNDS = 3, 7
MAX_MEASURED_S = 20.0  # no new round begins after this time
EQUAL_SHARE = 0.9  # share of another rate above which the difference may be noise
BUSY_SPREAD = 0.3  # spread of the rounds of one engine above which the machine is called busy
LOSING_SHARE, LOSING_ROUNDS = 1 - BUSY_SPREAD, 2  # an engine below this share in each of as many rounds is dropped


@dataclass(frozen=True)
class Rates:
    """Requests a second of one engine by the number of clients, one figure per round."""

    by_clients: Mapping[int, tuple[float, ...]]

    @property
    def rounds(self) -> np.ndarray:
        """One figure per round: the geometric mean over the numbers of clients."""
        return np.asarray(np.exp(np.mean([np.log(rates) for rates in self.by_clients.values()], axis=0)))

    @property
    def typical(self) -> float:
        """Median of the rounds."""
        return float(np.median(self.rounds))

    @property
    def spread(self) -> float:
        """Distance between the fastest and the slowest round, as a share of the median."""
        return float(np.ptp(self.rounds)) / self.typical

    def equals(self, faster: Rates) -> bool:
        """Return True if the lead of `faster` may be noise: it is small, and not there in every pair of rounds."""
        return self.typical >= EQUAL_SHARE * faster.typical and not self.below(faster)

    def below(self, faster: Rates, share: float = 1.0) -> bool:
        """Return True if it is slower than `share` of `faster` in every round that both had."""
        return all(one < share * other for one, other in zip(self.rounds, faster.rounds, strict=False))

    def __str__(self) -> str:
        """Format the median, the least and the most for each number of clients: "12 (11 to 13) and 20 (18 to 21)"."""
        each = self.by_clients.values()
        return " and ".join(f"{np.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})" for rates in each)


def measure(
    fronts: Mapping[str, Callable[[Sequence[Request]], object]],
    requests: Sequence[Request],
    clients: Sequence[int] = CLIENTS,
    count: int = REQUESTS,
) -> dict[str, Rates]:
    """Return the rates of each of `fronts` over `requests`, by name. A front answers a list of requests as one batch.

    Each round sends `count` requests for each number of `clients`. A front that is clearly slower has fewer rounds.
    """
    measured: dict[str, dict[int, list[float]]] = {name: {number: [] for number in clients} for name in fronts}
    for front in fronts.values():
        front(requests[:count])
    start, running = time.perf_counter(), dict(fronts)
    for finished in range(MAX_ROUNDS):
        if finished >= MIN_ROUNDS and (time.perf_counter() - start > MAX_MEASURED_S or settled(_rates(measured))):
            break
        for number in clients:
            drawn = np.random.default_rng([finished, number]).integers(len(requests), size=count)
            batches = [[requests[i] for i in drawn[at : at + number]] for at in range(0, count, number)]
            for name, front in running.items():
                round_start = time.perf_counter()
                for batch in batches:
                    front(batch)
                measured[name][number].append(count / (time.perf_counter() - round_start))
        if finished + 1 >= LOSING_ROUNDS:
            dropped = losing(_rates(measured))
            running = {name: front for name, front in running.items() if name not in dropped}
        if len(running) == 1:
            break
    return _rates(measured)


def fastest(rates: Mapping[str, Rates]) -> str:
    """Return the name of the one that answers most requests a second, of those that were measured to the end."""
    most = max(len(one.rounds) for one in rates.values())
    return max((name for name in rates if len(rates[name].rounds) == most), key=lambda name: rates[name].typical)


def losing(rates: Mapping[str, Rates]) -> set[str]:
    """Return those that are so much slower than the fastest, in every round, that no further round could change it."""
    best = rates[fastest(rates)]
    return {name for name, one in rates.items() if one.below(best, LOSING_SHARE)}


def in_words(rates: Mapping[str, Rates]) -> str:
    """Describe the rates by name: "at 1 and at 16 clients: NAME 12 (11 to 13) and 20 (18 to 21), ..."."""
    clients = " and at ".join(map(str, next(iter(rates.values())).by_clients))
    return f"at {clients} clients: " + ", ".join(f"{name} {rate}" for name, rate in rates.items())


def remark_on_noise(rates: Mapping[str, Rates], measured: str) -> str:
    """Return a remark for the report if the machine was busy. `measured`: the subject of the rates, e.g. "engine"."""
    worst = max(rate.spread for rate in rates.values())
    return f"; the machine was busy: the rounds of one {measured} are {worst:.0%} apart" if worst > BUSY_SPREAD else ""


def settled(rates: Mapping[str, Rates]) -> bool:
    """Return True if another round would not change the result.

    Then the fastest leads each of the others by more than noise in every round, or equals it.
    """
    best = rates[fastest(rates)]
    others = [one for one in rates.values() if one is not best]
    return all((one.typical < EQUAL_SHARE * best.typical) == one.below(best) for one in others)


def _rates(measured: Mapping[str, Mapping[int, Sequence[float]]]) -> dict[str, Rates]:
    return {name: Rates({clients: tuple(rates) for clients, rates in by.items()}) for name, by in measured.items()}
