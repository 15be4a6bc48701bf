"""Replacement of two Tritons behind one gateway, one after the other, while clients ask."""

from __future__ import annotations

import time
import urllib.request
from functools import partial
from pathlib import Path

from builder.clusters.deploy.pod import GATEWAY_PORT
from builder.repository.config.arguments import GRPC_PORT
from scripts.container_trial.containers import Container, removed_after, wait_for
from scripts.container_trial.engine import NETWORK, Engine, TrialError
from scripts.container_trial.repository import Repository
from scripts.container_trial.serve import GATEWAY_READY, READY, start_gateway, start_triton
from scripts.container_trial.traffic import under_load

NAME = "tritons"  # of all servers in the network's DNS
OLD, NEW = ("triton-1", "triton-2"), ("triton-3", "triton-4")
CLIENTS = 8
BEFORE_S, NOTICED_S = 5, 60


def replace(engine: Engine, repository: Repository, scratch: Path) -> str:
    """Start a Triton, wait until the gateway sends it requests, stop an old one; twice. Raises TrialError."""
    with removed_after(engine, "gateway", *OLD, *NEW):
        for name in OLD:
            _start(engine, name, repository)
        gateway = start_gateway(engine, f"dns:///{NAME}:{GRPC_PORT}")
        gateway.wait(GATEWAY_READY)
        host = gateway.address(NETWORK)
        with under_load([host], GATEWAY_PORT, [repository.answers], CLIENTS) as load:
            time.sleep(BEFORE_S)
            for old, new in zip(OLD, NEW, strict=True):
                address = _start(engine, new, repository).address(NETWORK)
                if not wait_for(partial(_accepts, host, address), NOTICED_S):
                    raise TrialError(f"the gateway did not notice {new} at {address} within {NOTICED_S} s")
                Container(engine, old).stop()
            time.sleep(BEFORE_S)
        load.require(CLIENTS)
    return f"{load}, from {CLIENTS} clients while {' and '.join(OLD)} were replaced"


def _start(engine: Engine, name: str, repository: Repository) -> Container:
    container = start_triton(engine, name, repository, repository.folder, f"--network-alias={NAME}")
    container.wait(READY)
    return container


def _accepts(host: str, server: str) -> bool:
    """Return True if the gateway sends requests to `server`."""
    metrics = urllib.request.urlopen(f"http://{host}:{GATEWAY_PORT}/metrics", timeout=10).read().decode()
    return f'build_repo_gateway_server_accepting{{server="{server}:{GRPC_PORT}"}} 1.0' in metrics
