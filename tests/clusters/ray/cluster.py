"""A Ray cluster of several nodes on this machine, whose nodes and processes can be killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from builder.clusters.ray.cluster import LOOPBACK, RAY_SETTINGS, RAY_TIMEOUTS
from builder.serving.server.triton import free_ports
from tests.valkey_server import HOST, valkey

LEAN = {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}  # start no processes in advance
SLOW = {  # slow processes do not count as dead; a dead node is noticed soon
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_health_check_failure_threshold": "2",  # default 5; a killed node's port does not answer at all
    "RAY_health_check_period_ms": "1000",
}
AGENTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
STORE = 80 << 20  # bytes of shared memory per node; Ray requires at least 75 MiB


class Nodes:
    """Nodes of `cluster`, a ray.cluster_utils.Cluster whose head node has no cores."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def at_least(self, count: int) -> list[str]:
        """Add nodes until at least `count` have a core; return these."""
        while len(self.cluster.worker_nodes) < count:
            self.cluster.add_node(num_cpus=1, **_small())
        return [node.node_id for node in self.cluster.worker_nodes]

    def kill(self, node_id: str) -> None:
        """Kill a node and all of its processes."""
        (node,) = [node for node in self.cluster.worker_nodes if node.node_id.startswith(node_id)]
        self.cluster.remove_node(node, allow_graceful=False)

    def of(self, process: int) -> str:
        """Return the node of a process, by the raylet among its ancestors."""
        raylets = {node.all_processes["raylet"][0].process.pid: node.node_id for node in self.cluster.worker_nodes}
        while process not in raylets:
            process = _parent(process)
        return str(raylets[process])


def _small() -> dict[str, Any]:
    """Return options of a node that is ready as soon as its raylet runs.

    A raylet waits for the ports that its agents choose, and fails if their imports take too long on a busy machine
    (WaitForDashboardAgentPorts in Ray's src/ray/raylet/node_manager.cc). It does not wait for ports given as options.
    See also `_telling`.
    """
    ports = {name: free_ports().http for name in AGENTS}
    return {"node_ip_address": "127.0.0.1", "object_store_memory": STORE, "include_dashboard": False, **ports}


def _telling(patch: pytest.MonkeyPatch) -> None:
    """Pass the agent's port to each raylet.

    Ray 2.60 passes it only to the agent, and each raylet then waits 15 s for a file with the port.
    That is too short if other programs run.
    """
    from ray._private import services

    start = services.start_ray_process

    def told(command: list[str], process_type: str, *positional: Any, **options: Any) -> Any:
        ports = re.findall(r"--listen-port=(\d+)", " ".join(command)) if process_type == "raylet" else []
        return start(
            [*command, *(f"--dashboard_agent_listen_port={port}" for port in ports)],
            process_type,
            *positional,
            **options,
        )

    patch.setattr(services, "start_ray_process", told)


@contextmanager
def ray_nodes() -> Iterator[Nodes]:
    """Run a cluster of a head node without cores, whose state is in a Valkey; `at_least` adds nodes."""
    port = free_ports().http
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # folder of sockets, whose paths have at most 107 characters
    with valkey(port), pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_REDIS_ADDRESS", f"{HOST}:{port}")
        for name, value in {**RAY_SETTINGS, **RAY_TIMEOUTS, **LOOPBACK, **LEAN, **SLOW, "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        (Path(folder) / "ray").mkdir()
        from ray.cluster_utils import Cluster

        _telling(patch)

        lean = {"num_cpus": 0, "no_monitor": True, "include_log_monitor": False}
        cluster = Cluster(initialize_head=True, head_node_args={**lean, **_small()})
        try:
            yield Nodes(cluster)
        finally:
            for node in [*cluster.worker_nodes, cluster.head_node]:
                cluster.remove_node(node, allow_graceful=False)  # it has nothing left to do
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def stubs(entry: Path) -> dict[int, int]:
    """Return the processes of a repository's model on this machine, and the Triton of each that has one.

    The parent of a process whose Triton was killed is another program.
    """
    stubs_found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            program, *arguments = (folder / "cmdline").read_bytes().split(b"\0")
            if program.endswith(b"triton_python_backend_stub") and arguments[0].startswith(f"{entry}/".encode()):
                triton = _parent(int(folder.name))
                if b"--model-repository=" in Path(f"/proc/{triton}/cmdline").read_bytes():
                    stubs_found[int(folder.name)] = triton
    return stubs_found


def _parent(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
