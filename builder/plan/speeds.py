"""How long an engine takes, as a line through what a build measured: a cost of each call, and one of each part."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from builder.speed import Latencies

SHAPE = re.compile(r"(\d+)x(\d+)")  # rows x tokens
ROWS = re.compile(r"token, (\d+) rows")
PROMPT = re.compile(r"(?:prompt|text) of (\d+)")


@dataclass(frozen=True)
class Cost:
    """Milliseconds: `call` for each call, plus `part` for each token (or row) in it."""

    call: float
    part: float

    def of(self, parts: float) -> float:
        """Milliseconds of a call of so many `parts`."""
        return self.call + self.part * parts


@dataclass(frozen=True)
class Decoding:
    """`step`: a step of the loop, by rows; `prompt_ms`: of a token that is read."""

    step: Cost
    prompt_ms: float


def encoder_cost(latency: Latencies) -> Cost | None:
    """The cost by tokens, padding included; None where nothing was timed."""
    shapes = {cell: ms for cell, ms in latency.items() if SHAPE.fullmatch(cell)}
    parts = {cell: float(np.prod([int(part) for part in cell.split("x")])) for cell in shapes}
    return _line({parts[cell]: ms for cell, ms in shapes.items()}) if len(set(parts.values())) > 1 else None


def decoding_cost(latency: Latencies) -> Decoding | None:
    """The costs of a decode loop; None where nothing was timed."""
    steps = {float(match[1]): ms for cell, ms in latency.items() if (match := ROWS.fullmatch(cell))}
    prompts = [ms / int(match[1]) for cell, ms in latency.items() if (match := PROMPT.fullmatch(cell))]
    if len(steps) < 2 or not prompts:
        return None
    return Decoding(_line(steps), prompts[0])


def _line(points: Mapping[float, float]) -> Cost:
    """The line of least relative squares, neither of whose costs is below 0: times of long calls are the noisier."""
    x, y = np.array(list(points)), np.array(list(points.values()))
    slope, base = np.polyfit(x, y, 1, w=1 / y)
    if base < 0:
        return Cost(0.0, float(np.sum(x / y) / np.sum((x / y) ** 2)))
    if slope < 0:
        return Cost(float(np.sum(1 / y) / np.sum(1 / y**2)), 0.0)
    return Cost(float(base), float(slope))
