"""The GPUs at hand: what a plan is compared with, and whether a repository for a GPU can be served here."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

QUERY = ("nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class GPU:
    name: str
    compute_capability: str
    memory_mb: int


def gpus() -> tuple[GPU, ...]:
    """The NVIDIA GPUs that the driver sees, in its order; none where there is no driver."""
    try:
        lines = subprocess.run(QUERY, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(GPU(name, capability, int(float(memory))) for name, capability, memory in map(_fields, lines))


def _fields(line: str) -> tuple[str, str, str]:
    name, capability, memory = (part.strip() for part in line.rsplit(",", 2))
    return name, capability, memory
