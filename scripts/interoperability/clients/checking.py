"""Checks by name that the client programs share; each passes or gives a reason. Standard library only."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

WORK: dict[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
CHECKS: dict[str, str] = {}


def check(name: str) -> Callable[[Callable[[], None]], None]:
    """Run the decorated function now, and record its outcome."""

    def run(work: Callable[[], None]) -> None:
        try:
            work()
            CHECKS[name] = "passed"
        except BaseException as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            CHECKS[name] = f"{type(error).__name__}: {lines[0]}"[:300]

    return run


def report() -> None:
    """Print the outcome of all checks; the last thing that a program does."""
    print(json.dumps({"checks": CHECKS}))
