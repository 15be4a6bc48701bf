"""The posts that this project grew out of, technique by technique, on this machine: `scripts/bench posts`.

Each row is one technique: the gain that the post claims, and the gain here. Sides are timed one after the other, each
in a process of its own, with equal threads.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from builder.checkpoints.libraries import quiet_libraries


@dataclass(frozen=True)
class Row:
    """One technique. `claim`: the post's own words, empty if it makes none; `base`: the row that `ratio` refers to."""

    technique: str
    value: str
    ratio: float | None = None
    claim: str = ""


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call `function` in a fresh process, without the threads of other engines."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh) as pool:
        return pool.submit(_quietly, function, *arguments).result()


@quiet_libraries()
def _quietly(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def median_ms(run: Callable[[], object], least: int = 5, seconds: float = 1.0) -> float:
    """Return the median of at least `least` runs, or as many as fit into `seconds`, after one run to warm up."""
    run()
    times: list[float] = []
    while len(times) < least or (sum(times) < seconds and len(times) < 100):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1000
