"""What the workers of a run share is made by the first that needs it; the others wait for it."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path


def once(place: Path, make: Callable[[], object]) -> None:
    """What `make` leaves in the folder `place`, which is empty before, is for all workers."""
    place.parent.mkdir(parents=True, exist_ok=True)
    done = place / "done"
    with place.with_name(f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(place, ignore_errors=True)  # of one that failed
            place.mkdir()
            make()
            done.touch()
