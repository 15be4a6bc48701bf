"""One content, many names: a hard link where that can be, else the blocks shared by the file system, else a copy.

What is linked is never written in place, by anything: a file is replaced, by one that was written beside it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

FICLONE = 0x40049409  # _IOW(0x94, 9, int) of linux/fs.h: ioctl_ficlone(2)


def link(source: Path, target: Path) -> str:
    """Have `target`, which is not there yet, hold what `source` does. Returns how: link, reflink or copy.

    Raises OSError.
    """
    try:
        os.link(source, target)
    except OSError:  # another file system, too many links, or links forbidden
        return clone(source, target)
    return "link"


def clone(source: Path, target: Path) -> str:
    """The same as a file of its own, whose blocks are shared until one of the two is written. Raises OSError."""
    with source.open("rb") as held, target.open("xb") as copy:
        try:
            fcntl.ioctl(copy.fileno(), FICLONE, held.fileno())
        except OSError:  # not on this file system, or not across two
            shutil.copyfileobj(held, copy, 1 << 22)
            return "copy"
    return "reflink"
