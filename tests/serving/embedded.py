"""The embedded tritonserver: its options, and an empty server with some of them."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from builder.serving.server.embedded import wheel_folder
from builder.serving.server.triton import Ports, free_ports


def embedded_options() -> set[str]:
    """Return the options that `tritonserver --help` lists."""
    shown = subprocess.run([_program(), "--help"], env=_environment(), capture_output=True, text=True, timeout=300)
    return set(re.findall(r"^\s+--([a-z-]+)", shown.stdout + shown.stderr, re.MULTILINE))


@contextmanager
def empty_server(options: Sequence[str], repository: Path) -> Iterator[Ports]:
    """Run a tritonserver with `options` on a `repository` without models."""
    ports = free_ports()
    addresses = [f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")]
    addresses += [f"--{kind}-port={port}" for kind, port in vars(ports).items()]
    command = [_program(), f"--model-repository={repository}", *addresses, *options]
    with subprocess.Popen(command, env=_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _wait(server, ports)
            yield ports
        finally:
            server.terminate()


def _wait(server: subprocess.Popen[bytes], ports: Ports) -> None:
    end = time.monotonic() + 300
    with grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
        while time.monotonic() < end:
            assert server.poll() is None, "it did not start"
            try:
                if client.is_server_ready(client_timeout=10):
                    return
            except InferenceServerException:
                time.sleep(0.05)
    raise AssertionError("it is not ready after five minutes")


def _program() -> str:
    return str(wheel_folder() / "bin" / "tritonserver")


def _environment() -> dict[str, str]:
    return {**os.environ, "LD_LIBRARY_PATH": str(wheel_folder().parent.parent / "nvidia_pytriton.libs")}
