"""Define the traffic of a load test: levels of load, and the share of each that a model gets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from builder.common.errors import SpecError

SHARE = ":"  # separates the name of a model, which cannot contain it, from its share
MAX_LEVELS = 100


@dataclass(frozen=True)
class Level:
    """Amount of load: concurrent requests, or requests a second at random times (a Poisson process)."""

    kind: Literal["concurrency", "rate"]
    value: float

    def __str__(self) -> str:
        return f"{self.value:g} at once" if self.kind == "concurrency" else f"{self.value:g}/s"

    def part(self, share: float) -> Level:
        """Return `share` of this level, 0 to 1; of concurrent requests, at least one."""
        value = self.value * share
        return Level(self.kind, max(1, round(value)) if self.kind == "concurrency" else value)


@dataclass(frozen=True)
class Target:
    """Model under load. `samples`: its requests, sent in random order; `share`: of all requests, 0 to 1."""

    name: str
    samples: Sequence[Mapping[str, Any]]
    share: float = 1.0


def concurrencies(text: str) -> tuple[Level, ...]:
    """Parse levels from an option such as `1,8,32` or `1:33:8`. Raises SpecError."""
    numbers = _numbers("--concurrency", text, int)
    return tuple(Level("concurrency", value) for value in numbers)


def rates(text: str) -> tuple[Level, ...]:
    """Parse levels from an option such as `5,10,20.5` or the ramp `10:100:10`. Raises SpecError."""
    return tuple(Level("rate", value) for value in _numbers("--rate", text, float))


def _numbers(option: str, text: str, kind: Callable[[str], float]) -> list[float]:
    """Parse a list with commas, or START:END:STEP as perf_analyzer writes a range, END included."""
    wrong = SpecError(f"{option} {text!r} is not a list of numbers such as 1,8,32, or START:END:STEP such as 10:100:30")
    try:
        values = [kind(part) for part in text.split(":" if ":" in text else ",")]
    except ValueError:
        raise wrong from None
    if not all(0 < value < math.inf for value in values):
        raise wrong
    if ":" in text:
        if len(values) != 3:
            raise wrong
        start, end, step = values
        if not 0 <= end - start <= MAX_LEVELS * step:
            raise wrong
        values = [start + step * i for i in range(int((end - start) / step + 1e-9) + 1)]
    if len(values) > MAX_LEVELS:
        raise wrong
    return values


def shares(texts: Sequence[str]) -> dict[str, float]:
    """Parse NAME or NAME:SHARE of each model in a mix; return shares that add up to 1. Raises SpecError."""
    by_model: dict[str, float] = {}
    for text in texts:
        name, _, share = text.partition(SHARE)
        try:
            value = float(share) if share else 1.0
        except ValueError:
            value = 0.0
        if not 0 < value < math.inf or name in by_model:
            raise SpecError(f"{text!r}: expected each model once, as NAME or NAME:SHARE with a share above 0")
        by_model[name] = value
    total = sum(by_model.values())
    return {name: value / total for name, value in by_model.items()}
