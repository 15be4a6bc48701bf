"""Places in a repository where each content was published last, so that another model with the same one links to it.

The user's cache has a symbolic link for each content, named by its SHA-256, so that the repository itself has nothing
but models. A file that was removed leaves a broken link. Callers compare contents before they link files.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from builder.common.cache.folder import cache_home, is_cache_disabled

FOLDER = "published"


class Published:
    """Contents of one repository, and `fresh`: those of the version that is being written."""

    def __init__(self, repository: Path) -> None:
        where = hashlib.sha256(str(repository.resolve()).encode()).hexdigest()[:32]
        self.folder = None if is_cache_disabled() else cache_home() / FOLDER / where
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
    for known in (cache_home() / FOLDER).glob("*/*"):
        if not known.exists():
            known.unlink(missing_ok=True)
