"""What the workers of a run share is made by the first that needs it; the others wait for it."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path


def once(folder: Path, make: Callable[[], object]) -> None:
    """What `make` leaves in `folder`, which is empty before, is for all workers."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = folder / "done"
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of one that failed
            folder.mkdir()
            make()
            done.write_text(json.dumps(_stamps(folder)))


def changed(folder: Path) -> list[str]:
    """The files of `folder` that were written to, or are gone, since `once` made them.

    Some are one file by several names: whoever writes to one changes what others share.
    """
    stamps = json.loads((folder / "done").read_text())
    return sorted(str(folder / name) for name, stamp in stamps.items() if _stamp(folder / name) != stamp)


def _stamps(folder: Path) -> dict[str, list[int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): _stamp(path) for path in files}


def _stamp(file: Path) -> list[int]:
    """Size and time of the last change; nothing of a file that is gone."""
    if not file.exists():
        return []
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]
