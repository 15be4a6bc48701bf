"""Names of the installed project: its distribution, its version, and the installation of its extras."""

from __future__ import annotations

from importlib.metadata import version

DISTRIBUTION = "triton-model-repository-builder"


def own_version() -> str:
    """Return the version that is installed."""
    return version(DISTRIBUTION)


def installing(extra: str) -> str:
    """Return the command that installs an extra of the project."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
