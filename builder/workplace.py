"""Where a build has its files until they are published: a temporary folder, on a disk that may be full.

Whoever writes there says so in a way of its own: Python by an errno, libraries in C++ by the system's words for it, and
tempfile by finding no folder at all.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from builder.errors import RepositoryError

FULL = (errno.ENOSPC, errno.EDQUOT)
SAY_FULL = (*map(os.strerror, FULL), "No usable temporary directory")


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder for the block alone. Raises RepositoryError where its disk is full; other errors pass as they are."""
    try:
        with tempfile.TemporaryDirectory(prefix="build-repo-") as folder:
            yield Path(folder)
    except RepositoryError:
        raise  # it says itself which disk is full
    except Exception as error:
        cause = _full(error)
        if cause is None:
            raise
        raise RepositoryError(
            f"the files of the build have no room ({cause}). Free some space, or have them on another disk: set TMPDIR "
            "to a folder there"
        ) from error


def _full(error: BaseException | None) -> str | None:
    """What says that a disk is full, in a line: `error`, or what it came from; None where nothing does."""
    while error is not None:
        text = str(error)
        if (isinstance(error, OSError) and error.errno in FULL) or any(words in text for words in SAY_FULL):
            return " ".join(text.split())[:300]
        error = error.__cause__ or error.__context__
    return None
