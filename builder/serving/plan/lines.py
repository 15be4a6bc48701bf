"""Define the lines of a plan: a quantity, the formula with its numbers, the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PlanLine:
    """One step of the arithmetic. `formula` has the numbers filled in."""

    quantity: str
    formula: str
    result: str


@dataclass(frozen=True)
class SpeedPlan:
    """Consequences of a measured speed. `cores`: busy cores; `rows`: an encoder's batch, or the slots of a loop."""

    lines: Sequence[PlanLine]
    settings: Mapping[str, object]
    lacking: Sequence[str]
    cores: float
    rows: int


@dataclass(frozen=True)
class ModelPlan:
    """Plan of one model.

    `settings`: keys of models.yaml, dotted, and their values. `lacking`: one sentence for each missing resource; empty
    if the load can be served. `cores`: the number that its texts and tokens alone keep busy. `memory`, `shm`: bytes.
    `gpu_memory`: bytes on each card, by its number.
    """

    name: str
    lines: tuple[PlanLine, ...]
    settings: Mapping[str, object]
    memory: int
    shm: int
    cores: float | None = None
    response_cache: int = 0
    lacking: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    gpu_memory: Mapping[int, int] = field(default_factory=dict)


def number(value: float) -> str:
    """Return `value` with three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def megabytes(size: float) -> str:
    return f"{number(size / 1e6)} MB"


def power_of_two(value: float) -> int:
    """Return the smallest power of two that is at least `value`."""
    return 1 << max(0, (max(1, int(-(-value // 1))) - 1).bit_length())
