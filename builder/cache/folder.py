"""Where the user's cache is: the one place for all that build-repo keeps between runs."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "BUILD_REPO_CACHE"
OFF = "off"  # instead of a folder: stages are not kept


def is_off() -> bool:
    """Whether builds are to take nothing that an earlier one made."""
    return os.environ.get(VARIABLE) == OFF


def cache_home() -> Path:
    """The folder that BUILD_REPO_CACHE names; build-repo in the user's cache folder where it names none."""
    stated = os.environ.get(VARIABLE)
    if stated and not is_off():
        return Path(stated).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "build-repo"
