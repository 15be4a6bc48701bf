"""Memory of a server and of the processes of its models, read from /proc and /dev/shm."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from builder.serving.server.triton import TritonServer

REGION = re.compile(r"shm-region-prefix-name=(\w+)")


@dataclass(frozen=True)
class Held:
    """Memory in megabytes (10^6 bytes): of Triton itself, of each process of a model, and Triton's shared memory."""

    triton: float
    processes: tuple[float, ...]
    shared: float

    @property
    def resident(self) -> float:
        """Megabytes of all processes. Shared memory is counted in each."""
        return self.triton + sum(self.processes)


def held(server: TritonServer) -> Held:
    """Return the memory of `server` at this moment."""
    own, processes = 0.0, []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(re.findall(r"^(PPid|Pid|VmRSS):\s+(\d+)", status.read_text(), re.MULTILINE))
        except OSError:
            continue  # the process has ended
        size = int(fields.get("VmRSS", 0)) * 1024 / 1e6
        if fields.get("Pid") == str(server.process.pid):
            own = size
        elif fields.get("PPid") == str(server.process.pid) and size:
            processes.append(size)
    return Held(own, tuple(sorted(processes)), _shared(server.process.args))


def _shared(command: object) -> float:
    """Return the megabytes of the Python backend's regions in /dev/shm for this server, whose command names them."""
    named = REGION.search(" ".join(map(str, command)) if isinstance(command, Sequence) else "")
    if named is None:
        return 0.0
    total = 0
    for path in Path("/dev/shm").glob(f"{named[1]}*"):
        try:
            total += path.stat().st_blocks * 512
        except OSError:
            continue  # the region was removed
    return total / 1e6
