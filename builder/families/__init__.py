"""One file a family of graphs: how its checkpoints are exported, verified, measured and laid out.

The folder is the registry: a task names its family, and `prepare` of that file makes what is published.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.checkpoint import Checkpoint
from builder.report import BuildReport
from builder.repository.layout import RepositoryEntry
from builder.spec import BuildSpec

Stage = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Prepared:
    """Verified entries, the front model first, and what is known of them."""

    entries: Sequence[RepositoryEntry]
    report: BuildReport


def prepare(spec: BuildSpec, checkpoint: Checkpoint, folder: Path, stage: Stage) -> Prepared:
    """Make and verify the entries of `checkpoint` in `folder`. Raises BuilderError."""
    family = importlib.import_module(f"{__name__}.{checkpoint.task.family}")
    prepared: Prepared = family.prepare(spec, checkpoint, folder, stage)
    return prepared
