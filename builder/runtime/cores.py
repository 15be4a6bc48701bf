"""Count the CPU cores that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def cores(limit: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the number of cores of this process's affinity, or fewer if its container has a CPU quota.

    More threads than the quota allows would only wait.
    `limit`: microseconds of quota and of its period, of cgroup v2 (Linux, Documentation/admin-guide/cgroup-v2.rst).
    """
    here = len(os.sched_getaffinity(0))
    try:
        quota, period = map(int, limit.read_text("utf-8").split())
    except (OSError, ValueError):  # no cgroup v2, or "max" for no quota
        return here
    return max(1, min(here, math.ceil(quota / period)))
