"""Examine this machine for `build-repo doctor`: what it can build and serve, and what to mend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from builder.serving.doctor.finding import Finding
from builder.serving.doctor.folders import find_folders
from builder.serving.doctor.hub import find_hub
from builder.serving.doctor.machine import find_gpus, find_memory, find_processor
from builder.serving.doctor.software import find_engines, find_extras, find_software, find_triton

__all__ = ["Finding", "examine"]


def examine(repository: Path) -> Iterator[Finding]:
    """Yield the findings on this machine, one after another; `repository`: the folder that builds publish to."""
    yield find_software()
    yield find_processor()
    yield find_memory()
    yield from find_gpus()
    yield from find_engines()
    yield find_triton()
    yield find_extras()
    yield find_hub()
    yield from find_folders(repository)
