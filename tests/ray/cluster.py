"""A Ray cluster of several nodes, all of them on this machine, and what of it can be killed."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from builder.ray.cluster import LOOPBACK, SETTINGS

LEAN = {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}  # no process before it has work
STORE = 80 << 20  # bytes of shared memory of a node: the least that Ray takes is 75 MiB


class Nodes:
    """`cluster`: a ray.cluster_utils.Cluster, whose first node only leads."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def at_least(self, count: int) -> list[str]:
        """The nodes that have a core, `count` of them or more."""
        while len(self.cluster.worker_nodes) < count:
            self.cluster.add_node(num_cpus=2, **_SMALL)
        return [node.node_id for node in self.cluster.worker_nodes]

    def kill(self, node_id: str) -> None:
        """End a node, and all that runs on it, at once."""
        (node,) = [node for node in self.cluster.worker_nodes if node.node_id.startswith(node_id)]
        self.cluster.remove_node(node, allow_graceful=False)

    def of(self, process: int) -> str:
        """The node that a process runs on: that whose raylet it descends from."""
        raylets = {node.all_processes["raylet"][0].process.pid: node.node_id for node in self.cluster.worker_nodes}
        while process not in raylets:
            process = _parent(process)
        return str(raylets[process])


_SMALL: dict[str, Any] = {"node_ip_address": "127.0.0.1", "object_store_memory": STORE, "include_dashboard": False}


@contextmanager
def ray_nodes() -> Iterator[Nodes]:
    """A cluster whose first node has no cores, and nothing else has any: see `at_least`."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # of sockets, whose paths have 107 characters at most
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**SETTINGS, **LOOPBACK, **LEAN, "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        (Path(folder) / "ray").mkdir()
        from ray.cluster_utils import Cluster

        lean = {"num_cpus": 0, "no_monitor": True, "include_log_monitor": False}
        cluster = Cluster(initialize_head=True, head_node_args={**lean, **_SMALL})
        try:
            yield Nodes(cluster)
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def stubs(entry: Path) -> dict[int, int]:
    """The processes of the model of a repository on every Triton of this machine, and the Triton of each."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            program, *arguments = (folder / "cmdline").read_bytes().split(b"\0")
            if program.endswith(b"triton_python_backend_stub") and arguments[0].startswith(f"{entry}/".encode()):
                found[int(folder.name)] = _parent(int(folder.name))
    return found


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])


def stop(process: int) -> None:
    os.kill(process, signal.SIGSTOP)


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
