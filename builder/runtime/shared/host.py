"""The models that are in memory: each loaded when it is asked for, the one not asked for longest making room.

Knows folders, bytes and a function that opens a version; knows nothing of Triton, texts or engines. The lock is over
the table alone: nothing is loaded or answered while it is held.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .emitted import Front
from .listing import Listing

ROOM_S = 30.0  # that a model waits for others to be done with their requests
GONE_S = 2.0  # after which what was dropped is gone: whoever answered last may hold it until it has a core again
LOOK_S = 0.05  # from one look at what is free to the next
BYTES_A_BYTE = 2  # of memory, by one of its files, before it was loaded once
MB = 1 << 20


class NoRoom(RuntimeError):
    """There is not enough memory for a model."""


@dataclass
class Loaded:
    """A model in memory. `lock`: one batch at a time; `users`: requests that keep it there."""

    name: str
    build: str
    front: Front
    size: int = 0
    users: int = 0
    used: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Tally:
    """What happened since the start."""

    loads: int = 0
    load_seconds: float = 0.0
    evictions: int = 0


class Host:
    """`limit`: bytes of this process; `resident`, `give_back`: of memory.py; `opened`: makes a front of a folder."""

    def __init__(
        self,
        listing: Listing,
        limit: int,
        opened: Callable[[Path], Front],
        resident: Callable[[], int],
        give_back: Callable[[], None],
    ) -> None:
        self.listing, self.limit = listing, limit
        self.opened, self.resident, self.give_back = opened, resident, give_back
        self.loaded: dict[str, Loaded] = {}
        self.sizes: dict[str, int] = {}  # by name and build, of models that were loaded once
        self.tally = Tally()
        self.dropped = -math.inf  # when a model last was
        self.table = threading.Condition()

    def take(self, name: str) -> Loaded | None:
        """A model that is in memory, kept there until `leave`; None where it has to be loaded."""
        with self.table:
            entry = self.loaded.get(name)
            if entry is not None:
                self._enter(entry)
            return entry

    def leave(self, model: Loaded) -> None:
        """What was taken, or loaded, is no longer in use."""
        with self.table:
            model.users -= 1
            self.table.notify_all()

    def load(self, name: str) -> Loaded:
        """Load the version of a model that is to answer now, in the place of another one; taken, until `leave`.

        Raises InputError for a name that is not hosted, NoRoom, and whatever keeps the model from being opened.
        """
        wanted = self.listing.get(name)
        folder = self.listing.folder / name / str(wanted.version)
        key = f"{name} {wanted.build}"
        self._make_room(name, self.sizes.get(key) or BYTES_A_BYTE * _bytes(folder))
        before, started = self.resident(), time.monotonic()
        model = Loaded(name, wanted.build, self.opened(folder))
        model.size = max(1, self.resident() - before)
        if self.tally.loads:  # the first load brings the engine's own memory along
            self.sizes[key] = min(model.size, self.sizes.get(key, model.size))  # others may grow meanwhile
        self._register(model, time.monotonic() - started)
        self._evict(0)
        return model

    def _register(self, model: Loaded, seconds: float) -> None:
        with self.table:
            self._enter(model)
            before = self.loaded.get(model.name)  # freed when this returns, not under the lock
            self.loaded[model.name] = model
            self.tally.loads += 1
            self.tally.load_seconds += seconds
        del before

    def _enter(self, model: Loaded) -> None:
        model.users += 1
        model.used = time.monotonic()

    def _make_room(self, name: str, needed: int) -> None:
        """Have `needed` bytes free below the limit. Raises NoRoom."""
        begun = time.monotonic()
        while not self._evict(needed):
            with self.table:
                if time.monotonic() < (begun + ROOM_S if self.loaded else self.dropped + GONE_S):
                    self.table.wait(LOOK_S)
                    continue
            raise NoRoom(
                f"{name} needs about {needed / MB:.0f} MB; this shared front has {self.resident() / MB:.0f} of its "
                f"{self.limit / MB:.0f} MB in use. Give it more: build-repo share --memory-mb"
            )

    def _evict(self, needed: int) -> bool:
        """Whether `needed` bytes are free below the limit, once models that nobody uses were dropped."""
        while True:
            lacking = self.resident() + needed - self.limit
            if lacking > 0:
                self.give_back()
                lacking = self.resident() + needed - self.limit
            if lacking <= 0:
                return True
            if not self._drop(lacking):
                return False

    def _drop(self, lacking: int) -> int:
        """Drop models that nobody uses, those not asked for longest first, until their sizes make up `lacking` bytes.

        Returns how many.
        """
        dropped: list[Loaded] = []  # freed when this returns, not under the lock
        with self.table:
            for model in sorted(self.loaded.values(), key=lambda model: model.used):
                if lacking > 0 and not model.users:
                    dropped.append(self.loaded.pop(model.name))
                    lacking -= model.size
                    self.dropped = time.monotonic()
            self.tally.evictions += len(dropped)
        return len(dropped)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
