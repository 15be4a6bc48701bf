"""Locate the folders of the installed project, read its version, and say how to install its extras."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

DISTRIBUTION = "triton-model-repository-builder"
PACKAGE = Path(__file__).parent.parent
RUNTIME = PACKAGE / "runtime"  # the code that is emitted


def own_version() -> str:
    """Return the version that is installed."""
    return version(DISTRIBUTION)


def installing(extra: str) -> str:
    """Return the command that installs an extra of the project."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
