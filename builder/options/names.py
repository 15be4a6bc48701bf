"""Names of models: each is a folder of the repository."""

from __future__ import annotations

import re

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def misnamed(name: str) -> str | None:
    """Return why `name` cannot be the name of a model, and what to do; None if it can."""
    if NAME.fullmatch(name):
        return None
    return f"the name {name!r} is not a model name: use letters, digits, '.', '_' and '-', without a path (--name)"
