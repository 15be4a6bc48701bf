"""Estimate a model's memory before it is loaded, and measure a Triton on this machine and its models (Linux).

The measure is the proportional set size: pages that several processes share, such as those of libraries, count once for
all of them together (Linux, Documentation/filesystems/proc.rst).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from builder.repository.config.render import CONFIG, parse
from builder.repository.report.record import REPORT
from builder.repository.versions import entry_names
from builder.runtime.contract import ContractError, load_shared
from builder.serving.plan.lines import PROCESS
from builder.serving.server.stubs import Stub, Stubs


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
        self._stubs: Stubs | None = None

    def find(self) -> bool:
        """Return True if the server is on this machine and its processes are readable."""
        if self.server is None or not psutil.pid_exists(self.server):
            self.server = _listener(self.url)
            self._stubs = None if self.server is None else Stubs(self.server)
        return self.server is not None

    def of(self, names: Iterable[str]) -> list[Stub]:
        models = set(names)
        return [stub for stub in self._find_stubs() if stub.model in models]

    def died(self) -> list[Stub]:
        """Return the processes that died without being reaped; see Stubs.died."""
        return self._stubs.died() if self._stubs is not None else []

    def usage(self) -> MemoryUsage:
        """Return the current memory of the server and of each model."""
        models: dict[str, int] = {}
        for stub in self._find_stubs():
            models[stub.model] = models.get(stub.model, 0) + size_of(stub.pid)
        return MemoryUsage(size_of(self.server) if self.server is not None else 0, models)

    def _find_stubs(self) -> list[Stub]:
        return self._stubs.find() if self._stubs is not None else []


def size_of(process: int) -> int:
    """Return the bytes of a process; 0 if it has ended or is not readable."""
    try:
        return int(psutil.Process(process).memory_full_info().pss)
    except psutil.Error:
        return 0


def _listener(url: str) -> int | None:
    """Return the process that listens on a port of this machine; None for another machine's address."""
    host, _, port = url.rpartition(":")
    if not _is_local(host):
        return None
    try:
        connections = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return None
    listening = (c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == int(port))
    return next((pid for pid in listening if pid is not None), None)


def _is_local(host: str) -> bool:
    """Return True if an address belongs to this machine, that is, if a socket can be bound to it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class MemoryEstimate:
    """Needs of a version.

    `size`: bytes of memory. `engines`: the Triton models that it calls, loaded and unloaded with it. `reserved`: bytes
    that it may grow to, however few it takes now.
    """

    size: int
    engines: tuple[str, ...] = ()
    reserved: int = 0


def estimate_memory(repository: Path, name: str, number: int) -> MemoryEstimate:
    """Return the needs of version `number` of a front and its engine. Raises RepositoryError or OSError.

    They are an estimate: every instance is a process with its own weights. A model that was loaded once is measured
    instead.
    """
    front, *engines = entry_names(repository, name, number)
    memory = _memory(repository / name, number)
    size = int(memory.get("cache", 0))
    for model in (front, *engines):
        groups = parse((repository / model / CONFIG).read_text("utf-8"), model).instance_group
        instances = max(1, sum(max(1, group.count) for group in groups))
        files = [entry.stat().st_size for entry in os.scandir(repository / model / str(number)) if entry.is_file()]
        adapters = int(memory.get("adapters", 0)) if model == front else 0  # which runs them in its own process
        size += instances * (PROCESS + sum(files) + adapters)
    try:
        reserved = load_shared(repository / name / str(number)).memory_mb << 20
    except ContractError:  # not a shared front
        reserved = 0
    return MemoryEstimate(max(reserved, size), tuple(engines), reserved)


def _memory(entry: Path, number: int) -> Mapping[str, int]:
    """Return the bytes of a model by purpose, from its build.json."""
    for path in (entry / str(number) / REPORT, entry / REPORT):
        if path.is_file():
            return dict(json.loads(path.read_text("utf-8")).get("memory") or {})
    return {}
