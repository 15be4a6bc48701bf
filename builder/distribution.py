"""What the project is called where it is installed from, in which version, and how its extras are installed."""

from __future__ import annotations

from importlib.metadata import version

DISTRIBUTION = "triton-model-repository-builder"


def own_version() -> str:
    """The version that is installed."""
    return version(DISTRIBUTION)


def installing(extra: str) -> str:
    """The command that installs what an extra of the project brings."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
