"""Place of the user's cache: the one folder for all that build-repo keeps between runs."""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

from builder.common.errors import SpecError

FOLDER_VARIABLE = "BUILD_REPO_CACHE"
DISABLED = "off"  # instead of a folder: stages are not kept
LIMIT_VARIABLE = "BUILD_REPO_CACHE_GB"
DEFAULT_MAX_GB, DEFAULT_MAX_DISK_SHARE = 20.0, 0.1  # by default: whichever of the two is less


def is_cache_disabled() -> bool:
    """Return True if builds do not reuse results of earlier ones."""
    return os.environ.get(FOLDER_VARIABLE) == DISABLED


def cache_home() -> Path:
    """Return the folder that BUILD_REPO_CACHE names; by default build-repo in the user's cache folder."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder and not is_cache_disabled():
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "build-repo"


def max_cache_bytes() -> int:
    """Return how many bytes stages may take: BUILD_REPO_CACHE_GB, in 10^9 bytes.

    By default 20 GB, or a tenth of the disk if that is less. Raises SpecError if the variable is not a number.
    """
    limit = os.environ.get(LIMIT_VARIABLE)
    if not limit:
        disk = shutil.disk_usage(_nearest_existing(cache_home())).total
        return int(min(DEFAULT_MAX_GB * 1e9, DEFAULT_MAX_DISK_SHARE * disk))
    try:
        gigabytes = float(limit)
    except ValueError:
        gigabytes = math.nan
    if not 0 <= gigabytes < math.inf:
        raise SpecError(f"{LIMIT_VARIABLE} is {limit!r}; expected how many 10^9 bytes the cache may take, such as 20")
    return round(gigabytes * 1e9)


def _nearest_existing(folder: Path) -> Path:
    """Return `folder`, or its nearest parent that exists."""
    # os.path.exists also works below a folder that may not be read: Path.exists raises there
    return next(one for one in (folder, *folder.absolute().parents) if os.path.exists(one))


def folder_size(folder: Path) -> int:
    """Return the bytes of the files in `folder` and below it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
