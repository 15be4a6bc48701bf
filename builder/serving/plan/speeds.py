"""Fit an engine's time by a line to a build's measurements: a cost per call, and one per part of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from builder.common.speed import Latencies

SHAPE = re.compile(r"(\d+)x(\d+)")  # rows x tokens
ROWS = re.compile(r"token, (\d+) rows")
PROMPT = re.compile(r"(?:prompt|text) of (\d+)")


@dataclass(frozen=True)
class CallCost:
    """Milliseconds: `call` for each call, plus `part` for each token (or row) in it."""

    call: float
    part: float

    def ms(self, parts: float) -> float:
        """Return the milliseconds of a call of `parts` parts."""
        return self.call + self.part * parts


@dataclass(frozen=True)
class DecodingSpeed:
    """Costs of a decode loop. `step`: a step, by rows; `prompt_ms`: milliseconds per prompt token."""

    step: CallCost
    prompt_ms: float


def encoder_cost(latency: Latencies) -> CallCost | None:
    """Return the cost by tokens, padding included; None if the build timed fewer than two sizes."""
    shapes = {cell: ms for cell, ms in latency.items() if SHAPE.fullmatch(cell)}
    parts = {cell: float(np.prod([int(part) for part in cell.split("x")])) for cell in shapes}
    return _line({parts[cell]: ms for cell, ms in shapes.items()}) if len(set(parts.values())) > 1 else None


def decoding_cost(latency: Latencies) -> DecodingSpeed | None:
    """Return the costs of a decode loop; None if the build timed too little."""
    steps = {float(match[1]): ms for cell, ms in latency.items() if (match := ROWS.fullmatch(cell))}
    prompts = [ms / int(match[1]) for cell, ms in latency.items() if (match := PROMPT.fullmatch(cell))]
    if len(steps) < 2 or not prompts:
        return None
    return DecodingSpeed(_line(steps), prompts[0])


def _line(points: Mapping[float, float]) -> CallCost:
    """Fit a line by least relative squares (times of long calls are noisier), with neither cost below 0."""
    x, y = np.array(list(points)), np.array(list(points.values()))
    slope, base = np.polyfit(x, y, 1, w=1 / y)
    if base < 0:
        return CallCost(0.0, float(np.sum(x / y) / np.sum((x / y) ** 2)))
    if slope < 0:
        return CallCost(float(np.sum(1 / y) / np.sum(1 / y**2)), 0.0)
    return CallCost(float(base), float(slope))
