"""Open a hosted model with the Python that was emitted with it: the verified code is the code that runs.

Python that is the same in two models is imported once.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Front:
    """Functions of a version: `answer` the requests of a batch, as tensors, and make each `response` for Triton."""

    answer: Callable[[Any], Any]
    response: Callable[[Any], Any]


def open_emitted(folder: Path) -> Front:
    """Open the version in `folder` as its own front would. Raises any error that prevents this."""
    package = package_of(folder)
    pipeline = importlib.import_module(f"{package}.encoder.front").open_front(folder)
    response = importlib.import_module(f"{package}.encoder.transport").response
    return Front(pipeline, response)


def package_of(folder: Path) -> str:
    """Import the Python in `folder` as a package, once for all folders with the same Python; return its name."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\n".encode())
        digest.update(path.read_bytes())
    name = f"emitted_{digest.hexdigest()[:32]}"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return name
