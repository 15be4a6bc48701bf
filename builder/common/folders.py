"""Where the package keeps what it emits and renders."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent.parent
RUNTIME = PACKAGE / "runtime"
