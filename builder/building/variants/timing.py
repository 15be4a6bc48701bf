"""Timing of any run: after a warm-up, until there are enough runs, as a median."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

MEASURED_S = 0.3  # time of the repeated runs
CHOOSING_SHARE, ROUGH_SHARE = 1 / 3, 0.1  # shares of that time: if a variant is chosen by the result, and if not
WARM_UP_RUNS, MIN_RUNS, MAX_RUNS = 2, 3, 20
LONG_RUN_S = 1.0  # beside a run this long, the extra work of a first run is small


def median_ms(run: Callable[[], object]) -> float:
    """Return the median of `MIN_RUNS` to `MAX_RUNS` runs after `WARM_UP_RUNS` more, in milliseconds.

    One long run is enough to warm up; short runs are repeated for `MEASURED_S`.
    """
    for _ in range(WARM_UP_RUNS):
        if _seconds(run) > LONG_RUN_S:
            break
    times: list[float] = []
    while len(times) < MIN_RUNS or (len(times) < MAX_RUNS and sum(times) < MEASURED_S):
        times.append(_seconds(run))
    return float(np.median(times)) * 1000


def warm_ms(run: Callable[[], object], share: float) -> float:
    """Return a rougher median of a warm run, in `share` of the time that `median_ms` takes.

    It is enough for PyTorch, which is only compared with, for a build that has nothing to choose, and for encoders,
    whose fastest variants are measured again as they will be served.
    """
    times: list[float] = []
    while not times or (len(times) < MIN_RUNS and sum(times) < share * MEASURED_S):
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
