"""Timing of any run: after a warm-up, until there are enough runs, as a median."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

ENOUGH_S = 0.3  # of repeated runs
SOONER, ROUGHLY = 1 / 3, 0.1  # shares of that: where a rough time chooses, and where none does
WARM_UP, LEAST, MOST = 2, 3, 20  # runs: before those that count, and the least and most of those that count
LONG_S = 1.0  # of one run: the extra work of a first run is small beside it


def median_ms(run: Callable[[], object]) -> float:
    """Return the median of `LEAST` to `MOST` runs after `WARM_UP` more, in milliseconds.

    One long run is enough to warm up; short runs are repeated for `ENOUGH_S`.
    """
    for _ in range(WARM_UP):
        if _seconds(run) > LONG_S:
            break
    times: list[float] = []
    while len(times) < LEAST or (len(times) < MOST and sum(times) < ENOUGH_S):
        times.append(_seconds(run))
    return float(np.median(times)) * 1000


def warm_ms(run: Callable[[], object], share: float) -> float:
    """Return the same in `share` of the time, for a run that is warm and needs a rough time only.

    That is PyTorch, which others are only compared with, all of a build that has nothing to choose, and encoders, of
    which the fastest are measured as they will be served.
    """
    times: list[float] = []
    while not times or (len(times) < LEAST and sum(times) < share * ENOUGH_S):
        times.append(_seconds(run))
    return float(np.median(times)) * 1000


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


@contextmanager
def pytorch_with(threads: int) -> Iterator[None]:
    """Run PyTorch with this number of threads, and without gradients."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            yield
    finally:
        torch.set_num_threads(before)
