"""The verbs of the command line, one file each: `parser()` says the options, `run(options)` does it.

Knows the screen; what the verbs do is in the rest of the package.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

DEFAULT_REPOSITORY = Path("model_repository")
DEFAULT_URL = "127.0.0.1:8001"
screen = Console(stderr=True)
