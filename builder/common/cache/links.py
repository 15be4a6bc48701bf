"""Link one content under many names: a hard link if possible, else blocks that the file system shares, else a copy.

A linked file is never written in place: it is replaced by one that was written beside it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

FICLONE = 0x40049409  # _IOW(0x94, 9, int) of linux/fs.h: ioctl_ficlone(2)


def link(source: Path, target: Path) -> str:
    """Give `target`, which must not exist, the content of `source`. Returns the method: link, reflink or copy.

    Raises OSError.
    """
    try:
        os.link(source, target)
    except OSError:  # another file system, too many links, or links forbidden
        return clone(source, target)
    return "link"


def clone(source: Path, target: Path) -> str:
    """Copy to a file of its own, whose blocks are shared until one of the two is written. Raises OSError.

    Returns the method: reflink or copy.
    """
    with source.open("rb") as held, target.open("xb") as copy:
        try:
            fcntl.ioctl(copy.fileno(), FICLONE, held.fileno())
        except OSError:  # not on this file system, or not across two
            shutil.copyfileobj(held, copy, 1 << 22)
            return "copy"
    return "reflink"
