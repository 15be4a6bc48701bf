"""Processes of a Triton on this machine and the memory of each, from /proc (Linux).

Each instance of a Python model is a child of tritonserver, whose first argument is the model's file. Memory is the
proportional set size: pages that several processes share, such as those of libraries, count once for all of them
together (Linux, Documentation/filesystems/proc.rst).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from builder.common.processes import PROC, counted

STUB = b"triton_python_backend_stub"
LISTENING = "0A"  # socket state in /proc/net/tcp


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes of the server itself, and of the processes of each model."""

    server: int = 0
    models: dict[str, int] = field(default_factory=dict)


class TritonProcesses:
    """Processes of the server that listens on the gRPC address `url`; none if it is not on this machine.

    Every method reads files, some of them hundreds: call it in a thread. Call `find` first.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.server: int | None = None
        self._models: dict[int, str] = {}  # model of each process that was examined
        self._dead: dict[int, int] = {}  # how often each was seen dead

    def find(self) -> bool:
        """Return True if the server is on this machine and its processes are readable."""
        if self.server is None or not (PROC / str(self.server)).is_dir():
            self.server, self._models = _listener(self.url), {}
        return self.server is not None

    def of(self, names: Iterable[str]) -> list[int]:
        """Return the processes of these models."""
        wanted = set(names)
        return [process for process, name in self._children().items() if name in wanted]

    def died(self) -> list[tuple[str, int]]:
        """Return (model, process) of zombies, each once, when seen twice in a row.

        Triton reaps the processes that it ended itself.
        """
        gone = [(process, name) for process, name in self._models.items() if name and _stat(process)[0] == "Z"]
        self._dead = {process: self._dead.get(process, 0) + 1 for process, _ in gone}
        return [(name, process) for process, name in gone if self._dead[process] == 2]

    def usage(self) -> MemoryUsage:
        """Return the current memory of the server and of each model."""
        models: dict[str, int] = {}
        for process, name in self._children().items():
            models[name] = models.get(name, 0) + size_of(process)
        return MemoryUsage(size_of(self.server) if self.server is not None else 0, models)

    def _children(self) -> dict[int, str]:
        """Return the server's children that run a model; only new processes are examined."""
        if self.server is None:
            return {}
        alive = {int(entry) for entry in os.listdir(PROC) if entry.isdecimal()}
        for process in alive - self._models.keys():
            model = _model(process, self.server)
            if model is not None:
                self._models[process] = model
        for process in self._models.keys() - alive:
            del self._models[process]
        return {process: name for process, name in self._models.items() if name}


def alive(processes: Iterable[int]) -> list[int]:
    """Return the processes that have not ended."""
    return [process for process in processes if _stat(process)[0] not in ("", "Z")]


def size_of(process: int) -> int:
    """Return the bytes of a process; 0 if it has ended or is not readable."""
    return counted(f"{process}/smaps_rollup", "Pss") or 0


def _model(process: int, server: int | None) -> str | None:
    """Return the model of a server's child: "" for another process, None for a child whose model is not known yet."""
    if _stat(process)[1] != str(server):
        return ""
    try:
        arguments = (PROC / str(process) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    if len(arguments) < 2 or not arguments[0].endswith(STUB):
        return None
    return Path(arguments[1].decode(errors="replace")).parent.parent.name


def _stat(process: int) -> tuple[str, str]:
    """Return the state and the parent of a process; empty strings if it has ended."""
    try:
        state, parent = (PROC / str(process) / "stat").read_text().rsplit(")", 1)[1].split()[:2]
    except (OSError, IndexError):
        return "", ""
    return state, parent


def _listener(url: str) -> int | None:
    """Return the process that listens on a port of this machine; None for another machine's address."""
    host, _, port = url.rpartition(":")
    if not _is_here(host):
        return None
    sockets = {f"socket:[{inode}]" for inode in _listening(int(port))}
    if not sockets:
        return None
    for folder in PROC.glob("[0-9]*"):
        try:
            if any(os.readlink(folder / "fd" / entry) in sockets for entry in os.listdir(folder / "fd")):
                return int(folder.name)
        except OSError:
            continue  # ended, or another user's
    return None


def _is_here(host: str) -> bool:
    """Return True if an address belongs to this machine, that is, if a socket can be bound to it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _listening(port: int) -> set[str]:
    """Return the inodes of the sockets that listen on a port."""
    ports = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                ports.add(fields[9])
    return ports
