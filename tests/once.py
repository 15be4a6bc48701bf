"""Resources that the workers of a run share: the first worker that needs one creates it, and the others wait."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path


def once(folder: Path, make: Callable[[], object]) -> None:
    """Run `make`, which fills the empty `folder`, once for all workers."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    done = folder / "done"
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)  # left by a failed attempt
            folder.mkdir()
            make()
            done.write_text(json.dumps(_stamps(folder)))


def changed(folder: Path) -> list[str]:
    """Return the files of `folder` that were modified or removed since `once` created them.

    Some are hard links: a write to one of them modifies the others too.
    """
    stamps = json.loads((folder / "done").read_text())
    return sorted(str(folder / name) for name, stamp in stamps.items() if _stamp(folder / name) != stamp)


def _stamps(folder: Path) -> dict[str, list[int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): _stamp(path) for path in files}


def _stamp(file: Path) -> list[int]:
    """Return the size and modification time of a file; an empty list for a removed file."""
    if not file.exists():
        return []
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns]
