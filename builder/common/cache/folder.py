"""Place of the user's cache: the one folder for all that build-repo keeps between runs."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

from builder.common.errors import SpecError

VARIABLE = "BUILD_REPO_CACHE"
OFF = "off"  # instead of a folder: stages are not kept
MOST = "BUILD_REPO_CACHE_GB"
MOST_GB, MOST_OF_DISK = 20.0, 0.1  # by default: whichever of the two is less


def is_off() -> bool:
    """Return True if builds take nothing from earlier ones."""
    return os.environ.get(VARIABLE) == OFF


def cache_home() -> Path:
    """Return the folder that BUILD_REPO_CACHE names; by default build-repo in the user's cache folder."""
    stated = os.environ.get(VARIABLE)
    if stated and not is_off():
        return Path(stated).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "build-repo"


def most_kept() -> int:
    """Return how many bytes stages may take: BUILD_REPO_CACHE_GB, in 10^9 bytes.

    By default 20 GB, or a tenth of the disk if that is less. Raises SpecError if the variable is not a number.
    """
    stated = os.environ.get(MOST)
    if not stated:
        return int(min(MOST_GB * 1e9, MOST_OF_DISK * shutil.disk_usage(_existing(cache_home())).total))
    try:
        most = float(stated)
    except ValueError:
        most = math.nan
    if not 0 <= most < math.inf:
        raise SpecError(f"{MOST} is {stated!r}; expected how many 10^9 bytes the cache may take, such as 20")
    return round(most * 1e9)


def _existing(folder: Path) -> Path:
    """Return `folder`, or its nearest parent that exists."""
    # os.path.exists also works below a folder that may not be read: Path.exists raises there
    return next(one for one in (folder, *folder.absolute().parents) if os.path.exists(one))


def size_of(folder: Path) -> int:
    """Return the bytes of the files in `folder` and below it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
