"""Extract from Triton's log why the server ended."""

from __future__ import annotations

import re


def start_failure(log: list[str]) -> str:
    """Return the reason in a log why the server did not start, in one line."""
    failed = [line for line in log if re.search(r"failed to load '([^']+)'", line)]
    if failed:
        name = re.search(r"failed to load '([^']+)'", failed[0])
        reason = failed[0].split("failed to load", 1)[1].split(": ", 1)[-1]
        assert name is not None
        return f"the model {name[1]} does not load: {reason[:300]}. Check the repository: build-repo check"
    return f"Triton stopped: {last_error(log)}; -v shows its log"


def last_error(log: list[str]) -> str:
    """Return the last error in a log, in one line."""
    errors = [line.split("] ", 1)[-1] for line in log if line.startswith("E") or "error" in line.lower()]
    return errors[-1][:300] if errors else "it gave no reason"
