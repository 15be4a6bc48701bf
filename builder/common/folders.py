"""Folders of the package and of the code that it emits."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent.parent
RUNTIME = PACKAGE / "runtime"
