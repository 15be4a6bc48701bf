"""Estimate a model's memory before it is measured: its processes, its files, and the memory that its build reserves."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from builder.repository.config.render import parse
from builder.repository.versions import CONFIG, REPORT, entry_names
from builder.runtime.contract import ContractError, load_shared
from builder.serving.plan.process import PROCESS


@dataclass(frozen=True)
class MemoryEstimate:
    """Needs of a version.

    `size`: bytes of memory. `engines`: the Triton models that it calls, loaded and unloaded with it. `reserved`: bytes
    that it may grow to, however few it takes now.
    """

    size: int
    engines: tuple[str, ...] = ()
    reserved: int = 0


def estimate_memory(repository: Path, name: str, number: int) -> MemoryEstimate:
    """Return the needs of version `number` of a front and its engine. Raises RepositoryError or OSError.

    They are an estimate: every instance is a process with its own weights. A model that was loaded once is measured
    instead.
    """
    front, *engines = entry_names(repository, name, number)
    models = [repository / model for model in (front, *engines)]
    size = sum(_instances(model) * (PROCESS + _files(model / str(number))) for model in models)
    reserved = _shared(repository / name / str(number))
    return MemoryEstimate(max(reserved, size + _cache(repository / name, number)), tuple(engines), reserved)


def _instances(entry: Path) -> int:
    groups = parse((entry / CONFIG).read_text("utf-8"), entry.name).instance_group
    return max(1, sum(max(1, group.count) for group in groups))


def _files(folder: Path) -> int:
    """Return the bytes of a version's graphs, weights and tokenisers."""
    return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())


def _shared(folder: Path) -> int:
    """Return the bytes that a shared front and all models it hosts may take; 0 for another front."""
    try:
        return load_shared(folder).memory_mb << 20
    except ContractError:
        return 0


def _cache(entry: Path, number: int) -> int:
    """Return the bytes of a generating model's cache, from its build.json."""
    for path in (entry / str(number) / REPORT, entry / REPORT):
        if path.is_file():
            memory = json.loads(path.read_text("utf-8")).get("memory") or {}
            return int(memory.get("cache", 0))
    return 0
