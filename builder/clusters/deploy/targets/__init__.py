"""Orchestrators. The folder is the registry: `kubernetes` is `kubernetes.py`, with `TARGET`."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from builder.clusters.deploy.deployment import Deployment


@dataclass(frozen=True)
class Target:
    """Target of a deployment.

    `files`: the files of a deployment, by their paths in the output folder; raises SpecError if the target cannot
    write them. `steps`: the commands that a user runs with that folder, one per line.
    """

    files: Callable[[Deployment], Mapping[str, str]]
    steps: Callable[[Deployment, Path], Sequence[str]]


def names() -> list[str]:
    """Return the names of all targets."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find_target(name: str) -> Target:
    """Return the target called `name`, which is one of names()."""
    target: Target = importlib.import_module(f"{__name__}.{name}").TARGET
    return target
