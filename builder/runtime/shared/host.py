"""List the hosted models, and keep them in memory: load each on request, and evict the least recently used one for it.

Knows folders, bytes and a function that opens a version; knows nothing of Triton, texts or engines. The lock guards
only the table of models: nothing is loaded or answered while it is held.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ..fields import InputError
from ..hosted import HOSTED, Hosted, HostedModel
from .emitted import Front

MAX_NAMES = 10  # in an error
FAMILIES = (
    ("shared_hosted", "GAUGE", "Models that a shared front answers for"),
    ("shared_loaded", "GAUGE", "Of them, models in memory"),
    ("shared_resident_bytes", "GAUGE", "Memory of its process"),
    ("shared_loads", "COUNTER", "Models loaded"),
    ("shared_load_seconds", "COUNTER", "Time that loading took"),
    ("shared_evictions", "COUNTER", "Models evicted to free memory for others"),
)
MEMORY_TIMEOUT_S = 30.0  # how long a load waits for other models to finish their requests
EVICTION_GRACE_S = 2.0  # an evicted model is freed late if the last thread that used it waits for a core
MEMORY_POLL_S = 0.05  # interval between checks for free memory
MEMORY_PER_FILE_BYTE = 2  # estimate of memory for each byte of a model's files, before its first load
MB = 1 << 20


class Listing:
    """Models of the repository `folder`: hosted.json, read again when it is replaced.

    Raises ContractError if hosted.json is invalid.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.read_of = self._file()
        self.models = Hosted(folder)

    def refresh(self) -> None:
        """Read hosted.json again if it was replaced. Raises ContractError; the models then stay as they were."""
        now = self._file()
        if now != self.read_of:
            self.read_of = now
            self.models = Hosted(self.folder)

    def get(self, name: str) -> HostedModel:
        """Return the model of that name. Raises InputError if there is none."""
        try:
            return self.models[name]
        except KeyError:
            pass
        known = sorted(self.models)
        shown = ", ".join(known[:MAX_NAMES]) + (f" and {len(known) - MAX_NAMES} more" if len(known) > MAX_NAMES else "")
        raise InputError(f"no model {name!r} is hosted here; there are: {shown or 'none'}")

    def text(self) -> str:
        """Return hosted.json unchanged."""
        return (self.folder / HOSTED).read_text("utf-8")

    def _file(self) -> tuple[int, int]:
        status = os.stat(self.folder / HOSTED)
        return status.st_ino, status.st_mtime_ns


class OutOfMemory(RuntimeError):
    """There is not enough memory for a model."""


@dataclass
class LoadedModel:
    """Model in memory. `lock`: one batch at a time; `users`: requests that use it."""

    name: str
    build: str
    front: Front
    size: int = 0
    users: int = 0
    last_used: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Host:
    """Models of one process. `limit`: bytes; `resident`, `trim`: of process_memory.py; `opened` opens a front."""

    def __init__(
        self,
        listing: Listing,
        limit: int,
        opened: Callable[[Path], Front],
        resident: Callable[[], int],
        trim: Callable[[], None],
    ) -> None:
        self.listing, self.limit = listing, limit
        self.opened, self.resident, self.trim = opened, resident, trim
        self.loaded: dict[str, LoadedModel] = {}
        self.sizes: dict[str, int] = {}  # by name and build, of models that have been loaded
        self.loads = self.evictions = 0
        self.load_seconds = 0.0
        self.evicted_at = -math.inf
        self.changed = threading.Condition()

    def values(self) -> dict[str, float]:
        """Return the current value of each family."""
        return {
            "shared_hosted": len(self.listing.models),
            "shared_loaded": len(self.loaded),
            "shared_resident_bytes": self.resident(),
            "shared_loads": self.loads,
            "shared_load_seconds": self.load_seconds,
            "shared_evictions": self.evictions,
        }

    def acquire(self, name: str) -> LoadedModel | None:
        """Return a model in memory, which stays there until `release`; None if it has to be loaded."""
        with self.changed:
            entry = self.loaded.get(name)
            if entry is not None:
                self._mark_used(entry)
            return entry

    def release(self, model: LoadedModel) -> None:
        """End the use of a model that was acquired or loaded."""
        with self.changed:
            model.users -= 1
            self.changed.notify_all()

    def load(self, name: str) -> LoadedModel:
        """Load the current version of a model, replacing an older one; it is in use until `release`.

        Raises InputError for a name that is not hosted, OutOfMemory, and any error that prevents opening the model.
        """
        hosted = self.listing.get(name)
        folder = self.listing.folder / name / str(hosted.version)
        key = f"{name} {hosted.build}"
        files = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        self._free_memory(name, self.sizes.get(key) or MEMORY_PER_FILE_BYTE * files)
        before, started = self.resident(), time.monotonic()
        model = LoadedModel(name, hosted.build, self.opened(folder))
        model.size = max(1, self.resident() - before)
        if self.loads:  # the first load also allocates the engine's own memory
            self.sizes[key] = min(model.size, self.sizes.get(key, model.size))  # others may grow meanwhile
        self._register(model, time.monotonic() - started)
        self._evict(0)
        return model

    def _register(self, model: LoadedModel, seconds: float) -> None:
        with self.changed:
            self._mark_used(model)
            before = self.loaded.get(model.name)  # freed when this returns, not under the lock
            self.loaded[model.name] = model
            self.loads += 1
            self.load_seconds += seconds
        del before

    def _mark_used(self, model: LoadedModel) -> None:
        model.users += 1
        model.last_used = time.monotonic()

    def _free_memory(self, name: str, needed: int) -> None:
        """Free `needed` bytes below the limit. Raises OutOfMemory."""
        started = time.monotonic()
        while not self._evict(needed):
            with self.changed:
                deadline = started + MEMORY_TIMEOUT_S if self.loaded else self.evicted_at + EVICTION_GRACE_S
                if time.monotonic() < deadline:
                    self.changed.wait(MEMORY_POLL_S)
                    continue
            raise OutOfMemory(
                f"{name} needs about {needed / MB:.0f} MB; this shared front has {self.resident() / MB:.0f} of its "
                f"{self.limit / MB:.0f} MB in use. Give it more: build-repo share --memory-mb"
            )

    def _evict(self, needed: int) -> bool:
        """Evict unused models until `needed` bytes are free below the limit; return False if that is not enough."""
        while True:
            lacking = self.resident() + needed - self.limit
            if lacking > 0:
                self.trim()
                lacking = self.resident() + needed - self.limit
            if lacking <= 0:
                return True
            if not self._evict_unused(lacking):
                return False

    def _evict_unused(self, lacking: int) -> int:
        """Evict unused models, least recently used first, until their sizes reach `lacking`; return how many."""
        evicted: list[LoadedModel] = []  # freed when this returns, not under the lock
        with self.changed:
            for model in sorted(self.loaded.values(), key=lambda model: model.last_used):
                if lacking > 0 and not model.users:
                    evicted.append(self.loaded.pop(model.name))
                    lacking -= model.size
                    self.evicted_at = time.monotonic()
            self.evictions += len(evicted)
        return len(evicted)
