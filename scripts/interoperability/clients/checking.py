"""What the programs share: checks by name, each of which passes or says why not. Standard library only."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

WORK: dict[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
CHECKS: dict[str, str] = {}


def check(name: str) -> Callable[[Callable[[], None]], None]:
    """Run what it decorates, now, and note what became of it."""

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
    """Say what became of all checks; the last thing that a program does."""
    print(json.dumps({"checks": CHECKS}))
