"""The embedded Triton: the tritonserver that the nvidia-pytriton wheel carries, on a repository, without Docker.

Knows processes, ports and logs; knows nothing about what the models do.
"""

from __future__ import annotations

import errno
import itertools
import re
import secrets
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from builder.errors import ServeError
from builder.serve.embedded import BACKENDS, Embedded, embedded
from builder.serve.log import why
from builder.serve.process import LAST_LINES_S, process_group
from builder.serve.refusals import SHARED_MEMORY, is_loopback, refuse_host, refuse_repository, refuse_unsigned
from builder.triton.arguments import EXIT_TIMEOUT_S
from builder.triton.liveness import NAME
from builder.triton.transaction import recover

IDLE_REPORTS = 4  # of a stopping server, one a second; a model's Python takes one or two to end
START_S = 600.0  # the models included; a server that ends meanwhile is noticed at once
ANSWER_S = 10.0  # of one that listens, to whether it is ready
FREE = range(20_000, 32_768)  # ports below those that Linux gives to whoever asks for any: ip(7), ip_local_port_range
UNTRIED = "Triton did not try to load it, as where it cannot read its config.pbtxt"  # it names no state then


@dataclass(frozen=True)
class Ports:
    """Where a server listens; Triton's own defaults."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002

    def options(self, host: str) -> list[str]:
        """The options of tritonserver that have it listen on these ports of `host`."""
        return [
            f"--{kind}-{part}={value}"
            for kind, port in vars(self).items()
            for part, value in (("address", host), ("port", port))
        ]


@dataclass(frozen=True)
class Model:
    """What a server says of a model: READY, or another state and the reason for it."""

    name: str
    version: str
    state: str
    reason: str


@dataclass(frozen=True)
class Server:
    """A running Triton. `log`: its output so far; `controlled`: whether models can be loaded and unloaded.

    `repository`: what it serves, where that is known. `verify_key`: what each model must have been signed with.
    """

    host: str
    ports: Ports
    process: subprocess.Popen[str]
    log: list[str]
    controlled: bool
    repository: Path | None = None
    on_demand: bool = False  # somebody else loads and unloads the models
    verify_key: Path | None = None

    @property
    def url(self) -> str:
        return f"{self.host}:{self.ports.grpc}"

    def models(self) -> list[Model]:
        """The models of the repository."""
        with grpc.InferenceServerClient(self.url) as client:
            index = client.get_model_repository_index(as_json=True)
        return [
            Model(
                m["name"], m.get("version", "-"), m.get("state", "-"), m.get("reason", "" if "state" in m else UNTRIED)
            )
            for m in index.get("models", [])
            if m["name"] != NAME
        ]


_turns = itertools.count(secrets.randbelow(len(FREE)))


def free_ports(host: str = "127.0.0.1") -> Ports:
    """Three ports that nothing listens on at this moment.

    It may take a server a minute to do so. So no port comes twice, each process begins elsewhere among them, and the
    system gives them to nobody: otherwise two servers that start at the same time get the same one now and then.
    """
    return Ports(*itertools.islice(_free(host), 3))


def _free(host: str) -> Iterator[int]:
    for turn in itertools.islice(_turns, len(FREE)):
        port = FREE[turn % len(FREE)]
        try:
            with socket.socket() as listener:
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
    timeout_s: float = START_S,
    echo: Callable[[str], None] | None = None,
    backends: Path = BACKENDS,
    strict: bool = True,
    insecure_bind: bool = False,
    verify_key: Path | None = None,
    on_demand: bool = False,
    liveness: bool = False,
) -> Iterator[Server]:
    """Start Triton on `repository`, wait until its models are loaded, stop it at the end.

    `strict`: every model must load, and the server is ready while all are; otherwise those that load are served.
    `echo` is called with each line of the server's log. `backends`: a folder NAME/ for each backend beside Python's,
    with its libtriton_NAME.so or its model.py. `insecure_bind`: `host` may be another address than a loopback one.
    `verify_key`: what every model must have been signed with, as builder/triton/signatures.py takes it.
    `on_demand`: no model is loaded, for a gateway does that. `liveness`: load the model that builder.serve.heartbeat
    asks for, from a repository of its own.
    Raises ServeError when it cannot start, with the reason and what to do.
    """
    if not insecure_bind:
        refuse_host(host)
    if on_demand and not is_loopback(host):
        raise ServeError(f"models are loaded on demand by model control, which nobody has on {host}: use 127.0.0.1")
    ports = ports or free_ports(host)
    recover(repository)
    refuse_repository(repository, backends, strict)
    refuse_taken(host, vars(ports))
    if verify_key is not None:
        refuse_unsigned(repository, verify_key)
    controlled = is_loopback(host)  # whoever reaches the ports may use model control
    loaded = ("*",) if not on_demand else (NAME,) if liveness else ()
    options = [*ports.options(host), *_loading(strict, controlled, loaded)]
    with (
        tempfile.TemporaryDirectory(prefix="triton-") as folder,
        _started(embedded(repository, Path(folder), backends, liveness), options, echo) as (process, log, reader),
    ):
        server = Server(host, ports, process, log, controlled, repository, on_demand, verify_key)
        try:
            _wait_until_ready(server, timeout_s, reader)
            if not strict and not on_demand and not any(model.state == "READY" for model in server.models()):
                raise ServeError(why(server.log))
            yield server
        finally:
            _stop(server)


@contextmanager
def _started(
    program: Embedded, options: Sequence[str], echo: Callable[[str], None] | None
) -> Iterator[tuple[subprocess.Popen[str], list[str], threading.Thread]]:
    """A tritonserver, what it writes and the thread that reads it; at the end nothing of it is left."""
    try:
        with process_group([*program.command, *options], program.environment, echo) as started:
            yield started
    finally:
        for leftover in SHARED_MEMORY.glob(f"{program.region}*"):
            leftover.unlink(missing_ok=True)


def _loading(strict: bool, controlled: bool, models: Sequence[str]) -> list[str]:
    """Load `models`, by options; under model control each can be loaded again."""
    options = [f"--exit-on-error={str(strict).lower()}", f"--strict-readiness={str(strict).lower()}"]
    if not controlled:
        return options
    return [*options, "--model-control-mode=explicit", *(f"--load-model={model}" for model in models)]


def refuse_taken(host: str, ports: Mapping[str, int]) -> None:
    """Raise ServeError for a port that cannot be used. `ports`: by the word that the option of each begins with."""
    for kind, port in ports.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise ServeError(
                    f"port {port} on {host} cannot be used ({error.strerror}); choose another: --{kind}-port N"
                ) from error


def _wait_until_ready(server: Server, timeout_s: float, reader: threading.Thread) -> None:
    end = time.monotonic() + timeout_s
    with grpc.InferenceServerClient(server.url) as client:
        while time.monotonic() < end:
            if server.process.poll() is not None:
                reader.join(LAST_LINES_S)
                raise ServeError(why(server.log))
            try:
                if client.is_server_ready(client_timeout=ANSWER_S) and _answers(server.host, server.ports.metrics):
                    return
            except InferenceServerException:
                pass
            time.sleep(0.1)
    raise ServeError(f"Triton was not ready within {timeout_s:.0f} s: {why(server.log)}")


def _answers(host: str, port: int) -> bool:
    """Whether somebody listens there. Triton opens the port of its metrics last, after it says that it is ready."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def _stop(server: Server) -> None:
    """Have the server finish what runs, until all that is left of it only waits. What remains is killed then.

    Triton keeps the first request of a gRPC stream until the client closes the stream, and with it the model, for up
    to its exit timeout of 30 s (server, src/grpc/stream_infer_handler.cc, IsAsyncNotifyState).
    """
    process = server.process
    process.terminate()
    end = time.monotonic() + EXIT_TIMEOUT_S + 5
    while process.poll() is None and time.monotonic() < end and not _drained(server):
        time.sleep(0.1)


def _drained(server: Server) -> bool:
    """Whether a stopping server has not unloaded another model for a while, and no decode loop has work."""
    alive = [match[1] for line in list(server.log) if (match := re.search(r"Found (\d+) live models and 0 in-", line))]
    if len(alive) < IDLE_REPORTS or len(set(alive[-IDLE_REPORTS:])) > 1:
        return False
    try:
        with urllib.request.urlopen(f"http://{server.host}:{server.ports.metrics}/metrics", timeout=2) as response:
            metrics = response.read().decode()
    except OSError:
        return False
    return all(
        float(n) == 0 for n in re.findall(r"^build_repo_(?:running|waiting)\{.*\} (\S+)$", metrics, re.MULTILINE)
    )
