"""Find the processes of a Triton on this machine that run Python models.

Each instance of a Python model is a child of tritonserver: Triton's Python stub, whose first argument is the model's
file, MODEL/VERSION/FILE.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
STUB = "triton_python_backend_stub"
REGION = "build_repo_"  # prefix of the shared memory of an embedded Triton, which is the stub's second argument
MIN_AGE_S = 60.0  # a younger region may be of a server in another container, which is about to open it


@dataclass(frozen=True)
class Stub:
    """Process that runs a version of a Python model."""

    process: psutil.Process
    model: str
    version: str

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def is_zombie(self) -> bool:
        """True if the process has died and was not reaped."""
        try:
            return self.process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    @property
    def is_alive(self) -> bool:
        """True if the process has not ended."""
        return self.process.is_running() and not self.is_zombie


class Stubs:
    """Stubs of the tritonserver process `server`."""

    def __init__(self, server: int) -> None:
        self.server = server
        self._stubs: dict[psutil.Process, Stub] = {}
        self._times_seen_dead: dict[Stub, int] = {}

    def find(self) -> list[Stub]:
        """Return the stubs now, zombies included that an earlier call found alive: a zombie has no arguments."""
        try:
            children = psutil.Process(self.server).children()
        except psutil.NoSuchProcess:
            children = []
        self._stubs = {child: stub for child in children if (stub := self._stubs.get(child) or _stub(child))}
        return list(self._stubs.values())

    def died(self) -> list[Stub]:
        """Return zombies among the stubs found last, each once, at the second call that sees it dead.

        Triton reaps the processes that it ended itself.
        """
        zombies = [stub for stub in self._stubs.values() if stub.is_zombie]
        self._times_seen_dead = {stub: self._times_seen_dead.get(stub, 0) + 1 for stub in zombies}
        return [stub for stub, times in self._times_seen_dead.items() if times == 2]


def end_orphans() -> None:
    """Kill the stubs of embedded Tritons that were killed, and remove the shared memory of Tritons that are gone.

    A stub ends by itself a moment after its server, unless it waits for a lock that the server had in their shared
    memory (python_backend, pb_stub.cc, UpdateHealth).
    """
    regions = list(SHARED_MEMORY.glob(f"{REGION}*"))  # before the processes: a server that starts now is among those
    alive = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # it has ended, or is another user's
            program, *arguments = process.cmdline() or [""]
            if program.endswith(STUB) and arguments[1:] and arguments[1].startswith(REGION) and _is_orphan(process):
                process.kill()
            else:
                alive.append(" ".join(arguments))
    for region in regions:
        prefix = region.name[: region.name.rindex("_") + 1]
        with suppress(OSError):  # it has been removed, or is another user's
            if time.time() - region.stat().st_mtime > MIN_AGE_S and not any(prefix in command for command in alive):
                region.unlink()


def _is_orphan(stub: psutil.Process) -> bool:
    parent = stub.parent()
    return parent is None or parent.name() != "tritonserver" or parent.status() == psutil.STATUS_ZOMBIE


def _stub(process: psutil.Process) -> Stub | None:
    try:
        arguments = process.cmdline()
    except psutil.Error:
        return None
    if len(arguments) < 2 or not arguments[0].endswith(STUB):
        return None
    version = Path(arguments[1]).parent
    return Stub(process, version.parent.name, version.name)
