"""Tritons that load models on demand, and two gateways: the pods that `deploy --load-on-demand` writes, under load.

Podman runs the pods. The trial does what a cluster does beside: names, readiness, restarts, and the rollout.
"""

from __future__ import annotations

import copy
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from builder.clusters.deploy.pod import GATEWAY_PORT
from builder.repository.config.arguments import EXIT_TIMEOUT_S, GRPC_PORT, HTTP_PORT
from scripts.container_trial.containers import Container, MemoryUse, read_memory, wait_for
from scripts.container_trial.engine import CLUSTER_NETWORK, Engine, TrialError
from scripts.container_trial.images import TRITON
from scripts.container_trial.manifests import Document, address_of_machine, playable, s3_store
from scripts.container_trial.name_server import HeadlessService
from scripts.container_trial.pod import address_of_pod
from scripts.container_trial.repository import CORES, Repository, build_variants
from scripts.container_trial.serve import GATEWAY_READY
from scripts.container_trial.traffic import Load, under_load

DEPLOYMENT = "models"
GATEWAYS = (f"{DEPLOYMENT}-1", f"{DEPLOYMENT}-2")
TRITONS = f"{DEPLOYMENT}-tritons"
OLD, NEW = (f"{TRITONS}-1", f"{TRITONS}-2"), (f"{TRITONS}-3", f"{TRITONS}-4")
CLAIM = "pulled"  # one volume with the models of all Tritons
VARIANTS, MEMORY_GB = 8, 0.8  # models, and memory of each Triton: for itself and two or three of them
CLIENTS = 4
MIN_EVICTIONS, EVICTIONS_TIMEOUT_S, NOTICED_S, PEAK_EVERY_S = 8, 300, 60, 0.25
PAUSE = ["sh", "-c", "trap exit TERM; sleep infinity & wait"]
LIVE = ("curl", "--fail", "--silent", f"http://127.0.0.1:{HTTP_PORT}/v2/health/live")
RESOLVE = (
    "python",
    "-c",
    f"import socket; print(*sorted({{a[4][0] for a in socket.getaddrinfo('{TRITONS}', {GRPC_PORT})}}))",
)


@dataclass
class Peak:
    """Most memory of processes and /dev/shm that a container took, in bytes, of its `limit`."""

    limit: int = 0
    anonymous: int = 0
    kills: int = 0

    def add(self, use: MemoryUse) -> None:
        self.limit, self.kills = use.limit, use.kills
        self.anonymous = max(self.anonymous, use.anonymous)

    def __str__(self) -> str:
        return f"{self.anonymous / 1e6:.0f} of {self.limit / 1e6:.0f} MB"


@dataclass
class Cluster:
    """Stand-in of a cluster: it starts and stops pods, and its name server knows those that are ready."""

    engine: Engine
    tritons: Document
    names: HeadlessService
    resolver: str  # address of the name server
    scratch: Path
    peaks: dict[str, Peak] = field(default_factory=dict)
    cgroups: dict[str, Path] = field(default_factory=dict)
    changes: dict[str, None] = field(default_factory=dict)

    def play(self, deployment: Document, pod: str) -> None:
        """Start a pod of a Deployment, and record what is changed for podman."""
        documents, changes = playable(copy.deepcopy(deployment), pod)
        spec = documents[-1]["spec"]
        spec["dnsConfig"] = {"nameservers": [self.resolver]}
        spec["containers"].append({"name": "pause", "image": TRITON, "command": PAUSE})
        self.changes |= dict.fromkeys([*changes, "a container that sleeps keeps a pod whose Triton is killed"])
        there = self.engine.podman("volume", "ls", "--format", "{{.Name}}").split()
        documents = [one for one in documents if one["metadata"]["name"] not in there]  # of a claim of several pods
        file = self.scratch / f"{pod}.yaml"
        file.write_text(yaml.safe_dump_all(documents), "utf-8")
        self.engine.podman("kube", "play", "--network", CLUSTER_NETWORK, file)

    def start(self, pod: str) -> None:
        """Start a Triton, and publish its address once it is live."""
        self.play(self.tritons, pod)
        self._publish(pod)

    def kill(self, pod: str) -> None:
        """End a Triton by SIGKILL and start it again in its pod; its address is withdrawn until it is live."""
        triton = self.triton(pod)
        self.engine.podman("restart", "--time", "0", triton.name)
        self.names.addresses.discard(self.address(pod))
        self._publish(pod)

    def stop(self, pod: str) -> None:
        """Withdraw the address of a Triton, let it answer for the time of its preStop, and end it."""
        self.names.addresses.discard(self.address(pod))
        (container,) = self.tritons["spec"]["template"]["spec"]["containers"]
        time.sleep(container["lifecycle"]["preStop"]["sleep"]["seconds"])
        self.engine.podman("pod", "stop", "--time", str(EXIT_TIMEOUT_S + 10), pod)
        self.engine.podman("pod", "rm", "--force", pod)

    def triton(self, pod: str) -> Container:
        return Container(self.engine, f"{pod}-triton")

    def address(self, pod: str) -> str:
        return address_of_pod(self.engine, pod, CLUSTER_NETWORK)

    @contextmanager
    def watching_memory(self) -> Iterator[None]:
        """Record the peaks of all Tritons while the block runs."""
        stopping = threading.Event()

        def watch() -> None:
            while not stopping.wait(PEAK_EVERY_S):
                for name, folder in list(self.cgroups.items()):
                    try:
                        self.peaks.setdefault(name, Peak()).add(read_memory(folder))
                    except OSError:  # its container has ended
                        continue

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()

    def _publish(self, pod: str) -> None:
        triton = self.triton(pod)
        triton.wait(LIVE)
        self.cgroups[pod] = triton.cgroup()
        self.names.addresses.add(self.address(pod))


def on_demand(engine: Engine, repository: Repository, scratch: Path) -> str:
    """Deploy more models than fit, kill a Triton, and replace both, while clients ask. Raises TrialError."""
    folder, models = build_variants(scratch / "variants", VARIANTS)
    resolver = address_of_machine(engine, CLUSTER_NETWORK)
    names = HeadlessService(TRITONS, resolver)
    try:
        with s3_store(engine, CLUSTER_NETWORK) as store, names.running():
            store.push(folder, *(answers.model for answers in models))
            section = {"pod": {"models_claim": CLAIM}, "models": [{"model": models[0].model}]}
            (scratch / "pod.yaml").write_text(yaml.dump(section), "utf-8")
            loading = ["--load-on-demand", f"--memory-gb={MEMORY_GB}", f"--cores={CORES}"]
            written = store.deploy(scratch / "deploy", *loading, "--pod", scratch / "pod.yaml")
            cluster = Cluster(engine, written["tritons"], names, resolver, scratch)
            for pod in OLD:
                cluster.start(pod)
            for pod in GATEWAYS:
                cluster.play(written["deployment"], pod)
                Container(engine, f"{pod}-gateway").wait(GATEWAY_READY)
            hosts = [cluster.address(pod) for pod in GATEWAYS]
            with cluster.watching_memory(), under_load(hosts, GATEWAY_PORT, models, CLIENTS) as load:
                said = _disturb(cluster, hosts, load)
    finally:
        engine.podman("pod", "rm", "--all", "--force")
        engine.podman("volume", "prune", "--force")
    load.require(CLIENTS)
    return f"{load}; {said}; changed for podman: {'; '.join(cluster.changes)}"


def _disturb(cluster: Cluster, hosts: Sequence[str], load: Load) -> str:
    """Kill a Triton and replace both once models are evicted; return what was seen, in words. Raises TrialError."""
    if not wait_for(lambda: _evictions(hosts) >= MIN_EVICTIONS, EVICTIONS_TIMEOUT_S):
        raise TrialError(f"{_evictions(hosts)} models were evicted, expected {MIN_EVICTIONS}: {load}")
    resolved = cluster.engine.podman("exec", f"{GATEWAYS[0]}-gateway", *RESOLVE).split()
    if resolved != sorted(map(cluster.address, OLD)):
        raise TrialError(f"{TRITONS} resolves to {resolved}, expected the addresses of {' and '.join(OLD)}")
    cluster.kill(OLD[0])
    _require_accepted(cluster, hosts, OLD[0])
    for old, new in zip(OLD, NEW, strict=True):
        cluster.start(new)
        time.sleep(cluster.tritons["spec"]["minReadySeconds"])
        _require_accepted(cluster, hosts, new)
        cluster.stop(old)
    killed = [name for name, peak in cluster.peaks.items() if peak.kills]
    if killed:
        raise TrialError(f"{killed[0]}: processes were killed for memory: {cluster.peaks[killed[0]]}")
    peaks = ", ".join(map(str, cluster.peaks.values()))
    return (
        f"{VARIANTS} models, {_evictions(hosts)} evicted; {TRITONS} had {len(resolved)} addresses; {OLD[0]} was "
        f"killed, {' and '.join(OLD)} were replaced; memory at most {peaks}, where gateways count {MEMORY_GB} GB"
    )


def _require_accepted(cluster: Cluster, hosts: Sequence[str], pod: str) -> None:
    """Wait until all gateways send requests to a Triton. Raises TrialError."""
    server = f"{cluster.address(pod)}:{GRPC_PORT}"
    line = f'build_repo_gateway_server_accepting{{server="{server}"}} 1.0'
    if not wait_for(lambda: all(line in _metrics(host) for host in hosts), NOTICED_S):
        raise TrialError(f"the gateways did not notice {pod} at {server} within {NOTICED_S} s")


def _evictions(hosts: Sequence[str]) -> int:
    """Return the models that the gateways have evicted."""
    lines = [line.split() for host in hosts for line in _metrics(host).splitlines()]
    return sum(int(float(line[1])) for line in lines if line[0] == "build_repo_gateway_model_evictions_total")


def _metrics(host: str) -> str:
    return str(urllib.request.urlopen(f"http://{host}:{GATEWAY_PORT}/metrics", timeout=10).read().decode())
