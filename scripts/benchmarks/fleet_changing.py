"""Changes to a fleet under load: models are rolled back, processes of models are killed, and its memory is measured."""

from __future__ import annotations

import math
import os
import random
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from builder.repository.versions import rollback
from builder.serving.gateway.residency.memory import MemoryUsage, TritonProcesses
from scripts.benchmarks.fleet_copies import VERSIONS

SAMPLE_S = 0.5
POPULAR = 50  # models that are rolled back
HOSTED_LOADS = re.compile(r"^build_repo_shared_loads_total\S* (\S+)$", re.MULTILINE)


@dataclass
class Fleet:
    """State of a fleet: the served version of each model and since when, the changes to it, and its memory."""

    order: Sequence[str]  # the most requested model first
    hosts: Mapping[str, Path]  # the repository of each
    served: dict[str, tuple[int, float]]
    processes: TritonProcesses
    metrics: str = ""  # Triton's, by address
    hosted_loads: int = 0  # of the shared front, over all its processes
    rollbacks: int = 0
    kills: int = 0
    sampled: list[tuple[float, float, int]] = field(default_factory=list)  # MB: shared pages once, and per process
    trouble: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def sample(self) -> None:
        """Measure until the run ends."""
        before = self._hosted()
        while not self.over.wait(SAMPLE_S):
            now = self._hosted()
            self.hosted_loads += now - before if now >= before else now
            before = now
            usage = self.processes.usage()
            pids = [stub.pid for stub in self.processes.of(usage.models)]
            held = sum(map(rss, [*pids, self.processes.server or 0]))
            self.sampled.append((total(usage) / 1e6, held / 1e6, len(usage.models)))

    def _hosted(self) -> int:
        """Return the number of models that the shared front has loaded since it started."""
        with urllib.request.urlopen(self.metrics, timeout=10) as response:
            match = HOSTED_LOADS.search(response.read().decode())
        return int(float(match[1])) if match else 0

    def disturb(self, every: float, dice: random.Random) -> None:
        """Roll back a model that is asked for often, kill a process, and so on until the run ends."""
        try:
            while not self.over.wait(every):
                self._roll_back(dice.choice(self.order[:POPULAR]))
                before = self.processes.usage().models
                if self.over.wait(every):
                    return
                victims = sorted(before.keys() & self.processes.usage().models)
                if victims:
                    self._kill(dice.choice(victims))
        except Exception as error:  # runs in a thread: the thread that started it reports this
            self.trouble.append(repr(error))

    def _roll_back(self, name: str) -> None:
        number = VERSIONS[0] + VERSIONS[1] - self.served[name][0]
        self.served[name] = (self.served[name][0], math.inf)  # during the change either may answer
        rollback(self.hosts[name], name, number)
        self.served[name] = (number, time.monotonic())
        self.rollbacks += 1

    def _kill(self, name: str) -> None:
        for stub in [stub for stub in self.processes.of([name]) if stub.is_alive][:1]:
            os.kill(stub.pid, signal.SIGKILL)
            self.kills += 1


def rss(process: int) -> int:
    """Return the resident bytes, pages that are shared with others included."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def total(usage: MemoryUsage) -> int:
    """Return the bytes of the server and all models."""
    return usage.server + sum(usage.models.values())
