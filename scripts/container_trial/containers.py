"""Run containers as the manifests confine them, wait for them, and read how much memory they took."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.container_trial.engine import Engine, TrialError

CONFINED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
START_TIMEOUT_S = 120  # to load the models on two busy cores
STOP_TIMEOUT_S = 45  # Triton finishes requests for 30 s
LOG_LINES, SHOWN_LINES = 200, 4  # of the end of a failed container's log: read, and shown


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a container in bytes. `anonymous`: of processes and /dev/shm; `peak`: with pages of files."""

    limit: int
    peak: int
    anonymous: int
    kills: int

    def __str__(self) -> str:
        return f"{self.anonymous / 1e6:.0f} MB (peak with files {self.peak / 1e6:.0f}) of {self.limit / 1e6:.0f} MB"


@dataclass(frozen=True)
class Container:
    """Container of the engine."""

    engine: Engine
    name: str

    def wait(self, check: Sequence[str], timeout: float = START_TIMEOUT_S) -> None:
        """Wait until the command `check` succeeds in the container. Raises TrialError with the end of its log."""

        def succeeds() -> bool:
            try:
                self.engine.podman("exec", self.name, *check, timeout=30)
            except TrialError:
                return False
            return True

        if not wait_for(lambda: not self.is_running() or succeeds(), timeout) or not self.is_running():
            raise TrialError(f"{self.name} did not become ready within {timeout:.0f} s: {self.last_lines()}")

    def is_running(self) -> bool:
        return self._inspect("{{.State.Running}}") == "true"

    def address(self, network: str) -> str:
        """Return its address in `network`."""
        networks = json.loads(self._inspect("{{json .NetworkSettings.Networks}}"))
        return str(networks[network]["IPAddress"])

    def memory(self) -> MemoryUse:
        """Return the memory that its cgroup has counted."""
        return read_memory(self.cgroup())

    def cgroup(self) -> Path:
        """Return the folder of the cgroup that counts its memory."""
        lines = Path(f"/proc/{self._inspect('{{.State.Pid}}')}/cgroup").read_text("utf-8").splitlines()
        groups = {controllers: path.lstrip("/") for _, controllers, path in (line.split(":", 2) for line in lines)}
        mounted = f"memory/{groups['memory']}" if "memory" in groups else groups[""]
        return Path("/sys/fs/cgroup") / mounted

    def stop(self) -> None:
        """Send SIGTERM and wait until the container has ended; remove it."""
        self.engine.podman("stop", "--time", str(STOP_TIMEOUT_S), self.name)
        self.engine.podman("rm", "--force", self.name)

    def last_lines(self) -> str:
        """Return the last lines of its log, those that tell of an error if there are any."""
        command = ["podman", "logs", "--tail", str(LOG_LINES), self.name]
        done = subprocess.run(command, env=self.engine.environment, capture_output=True, text=True, check=False)
        lines = [line for line in f"{done.stdout}\n{done.stderr}".splitlines() if line.strip(" +-|")]
        errors = [line for line in lines if re.search("error|fail", line, re.IGNORECASE)]
        return " | ".join((errors or lines)[-SHOWN_LINES:]) or "its log is empty"

    def _inspect(self, template: str) -> str:
        return self.engine.podman("inspect", "--format", template, self.name).strip()


def start(engine: Engine, name: str, image: str, options: Sequence[str], command: Sequence[str] = ()) -> Container:
    """Start a confined container. Raises TrialError."""
    engine.podman("run", "--detach", "--replace", "--name", name, *CONFINED, *options, image, *command)
    return Container(engine, name)


@contextmanager
def removed_after(engine: Engine, *names: str) -> Iterator[None]:
    """Remove containers in the end, whether the step passed or not."""
    try:
        yield
    finally:
        engine.podman("rm", "--force", "--ignore", "--time", "10", *names)


def wait_for(is_true: Callable[[], bool], timeout: float, every: float = 1.0) -> bool:
    """Return True once `is_true` does, False after `timeout` seconds."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if is_true():
            return True
        time.sleep(every)
    return False


def read_memory(folder: Path) -> MemoryUse:
    """Return what the files of a cgroup say, by version 1 or 2 of the interface.

    Source: Linux, Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst.
    """
    if (folder / "memory.limit_in_bytes").exists():
        names = ("memory.limit_in_bytes", "memory.max_usage_in_bytes", "memory.oom_control")
        counted = ("total_rss", "total_shmem")
    else:
        names = ("memory.max", "memory.peak", "memory.events")
        counted = ("anon", "shmem")
    limit, peak = (int((folder / name).read_text("utf-8")) for name in names[:2])
    stat, kills = _counts(folder / "memory.stat"), _counts(folder / names[2])["oom_kill"]
    return MemoryUse(limit, peak, sum(stat.get(name, 0) for name in counted), kills)


def _counts(file: Path) -> dict[str, int]:
    pairs = (line.split() for line in file.read_text("utf-8").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
