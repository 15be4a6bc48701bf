"""Run the embedded Triton, the tritonserver of the nvidia-pytriton wheel, on a repository without Docker.

Knows processes, ports and logs; knows nothing about the models' tasks.
"""

from __future__ import annotations

import errno
import itertools
import re
import secrets
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from builder.common.addresses import address_family, is_loopback, join_port
from builder.common.errors import ServeError
from builder.common.workplace import temporary_folder
from builder.repository.config.arguments import EXIT_TIMEOUT_S
from builder.repository.liveness import NAME
from builder.repository.transaction import recover
from builder.serving.server.embedded import BACKENDS, EmbeddedCommand, prepare_embedded
from builder.serving.server.process import READ_TIMEOUT_S, describe_exit, process_group
from builder.serving.server.refusals import refuse_host, refuse_repository, refuse_unsigned
from builder.serving.server.stubs import SHARED_MEMORY, end_orphans

IDLE_REPORTS = 4  # reports of a stopping server, one per second; a model's Python takes one or two to end
START_TIMEOUT_S = 600.0  # includes loading the models; a server that ends meanwhile is noticed at once
READY_TIMEOUT_S = 10.0  # for a listening server to answer whether it is ready
WITHOUT_GPU = ("CudaDriverHelper has not been initialized", "Failed to initialize NVML")  # of every start without one
LAST_LINES = 4  # of a log without an error
FREE_PORTS = range(20_000, 32_768)  # ports below the ephemeral range of Linux: ip(7), ip_local_port_range
NOT_TRIED = "Triton did not try to load it, as where it cannot read its config.pbtxt"  # the index then has no state


@dataclass(frozen=True)
class Ports:
    """Ports that a server listens on; the defaults are Triton's."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    def options(self, host: str) -> list[str]:
        """Return tritonserver's options to listen on these ports of `host`.

        Its services for HTTP are libevent's, with a prefix for IPv6 of its own (evhtp_bind_socket of libevhtp).
        """
        is_ipv6 = ":" in host
        addresses = {"grpc": f"[{host}]"} if is_ipv6 else {}
        other = f"ipv6:{host}" if is_ipv6 else host
        return [
            f"--{kind}-{part}={value}"
            for kind, port in vars(self).items()
            for part, value in (("address", addresses.get(kind, other)), ("port", port))
        ]


@dataclass(frozen=True)
class ModelState:
    """State of a model on the server: READY, or another state with its reason."""

    name: str
    version: str
    state: str
    reason: str


@dataclass(frozen=True)
class TritonServer:
    """A running Triton. `log`: its output so far; `controlled`: models can be loaded and unloaded.

    `repository`: the served one, if known. `verify_key`: key that each model must be signed with.
    """

    host: str
    ports: Ports
    process: subprocess.Popen[str]
    log: list[str]
    controlled: bool
    repository: Path | None = None
    on_demand: bool = False  # a gateway loads and unloads the models
    verify_key: Path | None = None

    @property
    def url(self) -> str:
        return join_port(self.host, self.ports.grpc)

    @property
    def metrics_url(self) -> str:
        return f"http://{join_port(self.host, self.ports.metrics)}/metrics"

    def models(self) -> list[ModelState]:
        """Return the models of the repository."""
        with grpc.InferenceServerClient(self.url) as client:
            index = client.get_model_repository_index(as_json=True)
        return [
            ModelState(
                m["name"],
                m.get("version", "-"),
                m.get("state", "-"),
                m.get("reason", "" if "state" in m else NOT_TRIED),
            )
            for m in index.get("models", [])
            if m["name"] != NAME
        ]


_next_ports = itertools.count(secrets.randbelow(len(FREE_PORTS)))


def free_ports(host: str = "127.0.0.1") -> Ports:
    """Return three ports that nothing listens on at this moment.

    A server may take a minute to bind its ports. So no port is returned twice, each process starts at another place of
    the range, and the range is outside the system's ephemeral ports: otherwise two servers that start at the same time
    would sometimes get the same port.
    """
    return Ports(*itertools.islice(_find_free_ports(host), 3))


def _find_free_ports(host: str) -> Iterator[int]:
    for turn in itertools.islice(_next_ports, len(FREE_PORTS)):
        port = FREE_PORTS[turn % len(FREE_PORTS)]
        try:
            with socket.socket(address_family(host)) as listener:
                listener.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        yield port


@contextmanager
def running(
    repository: Path,
    host: str = "127.0.0.1",
    ports: Ports | None = None,
    timeout_s: float = START_TIMEOUT_S,
    echo: Callable[[str], None] | None = None,
    backends: Path = BACKENDS,
    strict: bool = True,
    insecure_bind: bool = False,
    verify_key: Path | None = None,
    on_demand: bool = False,
    liveness: bool = False,
) -> Iterator[TritonServer]:
    """Run Triton on `repository`: start it, wait until its models are loaded, and stop it at the end.

    `strict`: every model must load, and the server is ready while all are; otherwise the models that load are served.
    `echo` is called with each line of the server's log. `backends`: a folder NAME/ for each backend beside Python's,
    with its libtriton_NAME.so or its model.py. `insecure_bind`: allow a `host` that is not a loopback address.
    `verify_key`: key that every model must be signed with, as in builder/repository/signatures.py. `on_demand`: load no
    model, since a gateway does that. `liveness`: load the model that builder.serving.server.heartbeat needs, from a
    repository of its own.
    Raises ServeError if the server cannot start, with the reason and the remedy.
    """
    if not insecure_bind:
        refuse_host(host)
    if on_demand and not is_loopback(host):
        raise ServeError(f"loading on demand needs model control, which is disabled on {host}: use 127.0.0.1")
    ports = ports or free_ports(host)
    recover(repository)
    refuse_repository(repository, backends, strict)
    refuse_taken_ports(host, vars(ports))
    if verify_key is not None:
        refuse_unsigned(repository, verify_key)
    controlled = is_loopback(host)  # every client of the ports may use model control
    options = [*ports.options(host)]
    options += [f"--exit-on-error={str(strict).lower()}", f"--strict-readiness={str(strict).lower()}"]
    if controlled:  # each loaded model can be reloaded
        loaded = ("*",) if not on_demand else (NAME,) if liveness else ()
        options += ["--model-control-mode=explicit", *(f"--load-model={model}" for model in loaded)]
    with (
        temporary_folder() as folder,
        _start(prepare_embedded(repository, folder, backends, liveness), options, echo) as (process, log, reader),
    ):
        server = TritonServer(host, ports, process, log, controlled, repository, on_demand, verify_key)
        try:
            _wait_until_ready(server, timeout_s, reader)
            if not strict and not on_demand and not any(model.state == "READY" for model in server.models()):
                raise ServeError(start_failure(server.log))
            yield server
        finally:
            _stop(server)


@contextmanager
def _start(
    program: EmbeddedCommand, options: Sequence[str], echo: Callable[[str], None] | None
) -> Iterator[tuple[subprocess.Popen[str], list[str], threading.Thread]]:
    """Run a tritonserver; yield its process, its output and the thread that reads it. End all its processes at exit.

    Also ends what killed servers left on this machine.
    """
    end_orphans()
    try:
        with process_group([*program.command, *options], program.environment, echo) as started:
            yield started
    finally:
        for leftover in SHARED_MEMORY.glob(f"{program.region}*"):
            leftover.unlink(missing_ok=True)


def refuse_taken_ports(host: str, ports: Mapping[str, int]) -> None:
    """Raise ServeError for a port that cannot be used. `ports`: by the prefix of their option names."""
    for kind, port in ports.items():
        with socket.socket(address_family(host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise ServeError(
                    f"port {port} on {host} cannot be used ({error.strerror}); choose another: --{kind}-port N"
                ) from error


def _wait_until_ready(server: TritonServer, timeout_s: float, reader: threading.Thread) -> None:
    end = time.monotonic() + timeout_s
    with grpc.InferenceServerClient(server.url) as client:
        while time.monotonic() < end:
            status = server.process.poll()
            if status is not None:
                reader.join(READ_TIMEOUT_S)
                raise ServeError(start_failure(server.log, status))
            try:
                is_ready = client.is_server_ready(client_timeout=READY_TIMEOUT_S)
            except InferenceServerException:
                is_ready = False
            if is_ready and _is_open(server.host, server.ports.metrics):
                return
            time.sleep(0.1)
    raise ServeError(f"Triton was not ready within {timeout_s:.0f} s: {start_failure(server.log)}")


def _is_open(host: str, port: int) -> bool:
    """Return True if the port is open. Triton opens its metrics port last, after it reports that it is ready."""
    with socket.socket(address_family(host)) as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def _stop(server: TritonServer) -> None:
    """Stop the server: let it finish running requests, until everything left of it only waits. The rest is killed then.

    Triton keeps the first request of a gRPC stream until the client closes the stream, and with it the model, for up to
    its exit timeout of 30 s (server, src/grpc/stream_infer_handler.cc, IsAsyncNotifyState).
    """
    process = server.process
    process.terminate()
    end = time.monotonic() + EXIT_TIMEOUT_S + 5
    while process.poll() is None and time.monotonic() < end and not _drained(server):
        time.sleep(0.1)


def _drained(server: TritonServer) -> bool:
    """Return True if a stopping server has not unloaded a model for a while, and no decode loop has work."""
    alive = [match[1] for line in list(server.log) if (match := re.search(r"Found (\d+) live models and 0 in-", line))]
    if len(alive) < IDLE_REPORTS or len(set(alive[-IDLE_REPORTS:])) > 1:
        return False
    try:
        with urllib.request.urlopen(server.metrics_url, timeout=2) as response:
            metrics = response.read().decode()
    except OSError:
        return False
    return all(
        float(n) == 0 for n in re.findall(r"^build_repo_(?:running|waiting)\{.*\} (\S+)$", metrics, re.MULTILINE)
    )


def start_failure(log: list[str], status: int | None = None) -> str:
    """Return the reason in a log why the server did not start, in one line. `status`: how its process ended."""
    for line in log:
        if failed := re.search(r"failed to load '([^']+)'", line):
            reason = line.split("failed to load", 1)[1].split(": ", 1)[-1]
            return f"the model {failed[1]} does not load: {reason[:300]}. Check the repository: build-repo check"
    ended = "" if status is None else f", {describe_exit(status)}"
    return f"Triton stopped{ended}: {last_error(log)}; -v shows its log"


def last_error(log: list[str]) -> str:
    """Return the last error in a log, in one line; where there is none, the last lines: those of C++ for an abort."""
    told = [line for line in log if not any(sign in line for sign in WITHOUT_GPU)]
    errors = [line.split("] ", 1)[-1] for line in told if line.startswith("E") or "error" in line.lower()]
    if errors:
        return errors[-1][:300]
    last = " | ".join(filter(None, map(str.strip, told[-LAST_LINES:])))
    return f"it gave no reason, and its last lines were: {last[:300]}" if last else "it gave no reason"
