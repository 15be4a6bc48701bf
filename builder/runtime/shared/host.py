"""Keep hosted models in memory: load each on request, and evict the least recently used one for it.

Knows folders, bytes and a function that opens a version; knows nothing of Triton, texts or engines. The lock guards
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

ROOM_S = 30.0  # how long a load waits for other models to finish their requests
GONE_S = 2.0  # after which a dropped model is freed: the last thread to answer may hold it until it has a core again
LOOK_S = 0.05  # interval between checks for free memory
BYTES_A_BYTE = 2  # estimate of memory for each byte of a model's files, before its first load
MB = 1 << 20


class NoRoom(RuntimeError):
    """There is not enough memory for a model."""


@dataclass
class Loaded:
    """Model in memory. `lock`: one batch at a time; `users`: requests that keep it there."""

    name: str
    build: str
    front: Front
    size: int = 0
    users: int = 0
    used: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Tally:
    """Counters since the start."""

    loads: int = 0
    load_seconds: float = 0.0
    evictions: int = 0


class Host:
    """Models of one process. `limit`: bytes; `resident`, `give_back`: of memory.py; `opened`: opens a front."""

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
        self.sizes: dict[str, int] = {}  # by name and build, of models that have been loaded
        self.tally = Tally()
        self.dropped = -math.inf  # time of the last drop
        self.table = threading.Condition()

    def take(self, name: str) -> Loaded | None:
        """Return a model in memory, kept there until `leave`; None if it has to be loaded."""
        with self.table:
            entry = self.loaded.get(name)
            if entry is not None:
                self._enter(entry)
            return entry

    def leave(self, model: Loaded) -> None:
        """End the use of a model that was taken or loaded."""
        with self.table:
            model.users -= 1
            self.table.notify_all()

    def load(self, name: str) -> Loaded:
        """Load the version of a model that answers now, in place of another one; it is in use until `leave`.

        Raises InputError for a name that is not hosted, NoRoom, and any error that prevents opening the model.
        """
        wanted = self.listing.get(name)
        folder = self.listing.folder / name / str(wanted.version)
        key = f"{name} {wanted.build}"
        self._make_room(name, self.sizes.get(key) or BYTES_A_BYTE * _bytes(folder))
        before, started = self.resident(), time.monotonic()
        model = Loaded(name, wanted.build, self.opened(folder))
        model.size = max(1, self.resident() - before)
        if self.tally.loads:  # the first load also allocates the engine's own memory
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
        """Free `needed` bytes below the limit. Raises NoRoom."""
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
        """Drop unused models until `needed` bytes are free below the limit; return False if that is not enough."""
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
        """Drop unused models, least recently used first, until their sizes reach `lacking`; return how many."""
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
