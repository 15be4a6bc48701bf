"""Locate the user's cache, where build-repo stores everything between runs, and its folders beside the stages.

runtimes/, programs/   packages fetched from an index to run here: engines of Triton releases, perf_analyzer; each is a
                       folder of its own, whole or not there
published/             where each content of a repository was published last, so that another model with the same one
                       links to it: a symbolic link named by its SHA-256, which breaks when the file is removed
locks/                 a file for each running build, named by its key, so that two processes do not build the same
"""

from __future__ import annotations

import hashlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from builder.common.errors import SpecError

FOLDER_VARIABLE = "BUILD_REPO_CACHE"
DISABLED = "off"  # instead of a folder: stages are not kept
LIMIT_VARIABLE = "BUILD_REPO_CACHE_GB"
DEFAULT_MAX_GB, DEFAULT_MAX_DISK_SHARE = 20.0, 0.1  # by default: whichever of the two is less
ENGINES, PROGRAMS, PUBLISHED, LOCKS = "runtimes", "programs", "published", "locks"
IN_USE_S = 3600  # since the last use of a fetched package: a build or a load test may be running it


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
        home = cache_home()
        # os.path.exists also works below a folder that may not be read: Path.exists raises there
        existing = next(folder for folder in (home, *home.absolute().parents) if os.path.exists(folder))
        disk = shutil.disk_usage(existing).total
        return int(min(DEFAULT_MAX_GB * 1e9, DEFAULT_MAX_DISK_SHARE * disk))
    try:
        gigabytes = float(limit)
    except ValueError:
        gigabytes = math.nan
    if not 0 <= gigabytes < math.inf:
        raise SpecError(f"{LIMIT_VARIABLE} is {limit!r}; expected how many 10^9 bytes the cache may take, such as 20")
    return round(gigabytes * 1e9)


def folder_size(folder: Path) -> int:
    """Return the bytes of the files in `folder` and below it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def fetched_folder(kind: str, name: str) -> Path:
    """Return the folder of `name` among `kind`, ENGINES or PROGRAMS, and mark it as used now; it may be absent."""
    folder = cache_home() / kind / name
    with suppress(OSError):
        os.utime(folder)
    return folder


def prune_fetched(max_bytes: int) -> tuple[list[str], int]:
    """Remove the least recently used folders until the rest fits into `max_bytes`; those that may be in use stay.

    Returns the names of the removed folders, and the bytes that are left of `max_bytes`, 0 if none are.
    """
    removed = []
    fetched = [path for kind in (ENGINES, PROGRAMS) for path in (cache_home() / kind).glob("*") if path.is_dir()]
    for folder in sorted(fetched, key=_last_used, reverse=True):
        size = folder_size(folder)
        if size <= max_bytes or time.time() - _last_used(folder) < IN_USE_S:
            max_bytes = max(0, max_bytes - size)
        else:
            max_bytes = 0  # older ones go too
            with suppress(FileNotFoundError), tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                folder.rename(Path(scratch, folder.name))  # so that no process sees a part of it
            removed.append(folder.name)
    return removed, max_bytes


def _last_used(folder: Path) -> float:
    with suppress(FileNotFoundError):
        return folder.stat().st_mtime
    return 0.0


class Published:
    """Contents of one repository, and `fresh`: those of the version that is being written.

    Callers compare contents before they link files.
    """

    def __init__(self, repository: Path) -> None:
        where = hashlib.sha256(str(repository.resolve()).encode()).hexdigest()[:32]
        self.folder = None if is_cache_disabled() else cache_home() / PUBLISHED / where
        self.fresh: dict[str, Path] = {}

    def find(self, digest: str) -> Iterator[Path]:
        """Yield the files that had the content `digest` when they were written."""
        if digest in self.fresh:
            yield self.fresh[digest]
        if self.folder is not None:
            with suppress(OSError):
                yield Path(os.readlink(self.folder / digest))

    def note(self, digest: str, file: Path) -> None:
        """Record that `file` has the content `digest`. Failures are ignored: they cost disk space and nothing else."""
        if self.folder is None:
            return
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            beside = self.folder / f".{digest}.{os.getpid()}.{time.monotonic_ns()}"
            beside.symlink_to(file.resolve())
            beside.replace(self.folder / digest)


def forget_removed() -> None:
    """Remove the links to files that no longer exist."""
    for known in (cache_home() / PUBLISHED).glob("*/*"):
        if not known.exists():
            known.unlink(missing_ok=True)
