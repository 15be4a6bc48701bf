"""The embedded Triton: the tritonserver that the nvidia-pytriton wheel carries, on a repository, without Docker.

Knows processes, ports and logs; knows nothing about what the models do.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import shutil
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

from builder.engines import tensorrt_llm, vllm
from builder.engines.gpu import gpus
from builder.errors import RepositoryError, ServeError
from builder.triton.arguments import EXIT_TIMEOUT_S, RESPONSE_CACHE, RESTRICTED
from builder.triton.check import pending
from builder.triton.render import parse
from builder.triton.signatures import unsigned
from builder.triton.transaction import recover

EMBEDDED = "24.10"  # the release whose server, 2.51, the nvidia-pytriton wheel carries
BACKENDS = Path(__file__).parent / "backends"
SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_NEEDED = 256 << 20
KIND_GPU = model_config_pb2.ModelInstanceGroup.KIND_GPU
LOG_LINES = 10_000  # that are kept
IDLE_REPORTS = 4  # of a stopping server, one a second; a model's Python takes one or two to end
PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
UNTRIED = "Triton did not try to load it, as where it cannot read its config.pbtxt"  # it names no state then


@dataclass(frozen=True)
class Ports:
    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002


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

    `repository`: what it serves, where that is known.
    """

    host: str
    ports: Ports
    process: subprocess.Popen[str]
    log: list[str]
    controlled: bool
    repository: Path | None = None
    on_demand: bool = False  # somebody else loads and unloads the models

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
        ]


def free_ports(host: str = "127.0.0.1") -> Ports:
    """Three ports that nothing listens on at this moment."""
    sockets = [socket.socket() for _ in range(3)]
    try:
        for listener in sockets:
            listener.bind((host, 0))
        return Ports(*(listener.getsockname()[1] for listener in sockets))
    finally:
        for listener in sockets:
            listener.close()


@contextmanager
def running(
    repository: Path,
    host: str = "127.0.0.1",
    ports: Ports | None = None,
    timeout_s: float = 120,
    echo: Callable[[str], None] | None = None,
    backends: Path = BACKENDS,
    strict: bool = True,
    insecure_bind: bool = False,
    verify_key: Path | None = None,
    on_demand: bool = False,
) -> Iterator[Server]:
    """Start Triton on `repository`, wait until its models are loaded, stop it at the end.

    `strict`: every model must load, and the server is ready while all are; otherwise those that load are served.
    `echo` is called with each line of the server's log. `backends`: a folder NAME/ for each backend beside Python's,
    with its libtriton_NAME.so or its model.py. `insecure_bind`: `host` may be another address than a loopback one.
    `verify_key`: what every model must have been signed with, as builder/triton/signatures.py takes it.
    `on_demand`: no model is loaded, for a gateway does that.
    Raises ServeError when it cannot start, with the reason and what to do.
    """
    if not insecure_bind:
        _refuse_others(host)
    if on_demand and not _is_loopback(host):
        raise ServeError(f"models are loaded on demand by model control, which nobody has on {host}: use 127.0.0.1")
    ports = ports or free_ports(host)
    recover(repository)
    _check(repository, host, ports, backends, strict)
    if verify_key is not None:
        _refuse_unsigned(repository, verify_key)
    with tempfile.TemporaryDirectory(prefix="triton-") as place:
        command, environment, region = _command(repository, host, ports, Path(place), backends)
        controlled = _is_loopback(host)  # whoever reaches the ports may use model control
        command += _loading(strict, controlled, () if on_demand else ("--load-model=*",))
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        server = Server(host, ports, process, [], controlled, repository, on_demand)
        reader = threading.Thread(target=_read, args=(server, echo), daemon=True)
        reader.start()
        try:
            _wait_until_ready(server, timeout_s)
            if not strict and not on_demand and not any(model.state == "READY" for model in server.models()):
                raise ServeError(why(server.log))
            yield server
        finally:
            _stop(server)
            reader.join(timeout=5)
            if process.stdout is not None:
                process.stdout.close()
            for leftover in SHARED_MEMORY.glob(f"{region}*"):
                leftover.unlink(missing_ok=True)


def wheel_folder() -> Path:
    """Where the nvidia-pytriton wheel keeps tritonserver. Raises ServeError where there is none."""
    found = importlib.util.find_spec("pytriton")
    folder = Path(found.origin).parent / "tritonserver" if found is not None and found.origin else None
    if folder is None or not (folder / "bin" / "tritonserver").is_file():
        raise ServeError(
            f"no tritonserver for {sys.platform}: the nvidia-pytriton wheel, which carries it, exists for Linux x86-64 "
            "and arm64. Use the container instead: docker compose --profile cpu up"
        )
    return folder


def _check(repository: Path, host: str, ports: Ports, backends: Path, strict: bool) -> None:
    if not repository.is_dir() or not any(repository.glob("*/config.pbtxt")):
        raise ServeError(f"{repository} holds no model; build one first: build-repo MODEL --output {repository}")
    refused = [*pending(repository).values(), *_not_here(repository, _names(backends), strict)]
    if refused:
        raise ServeError(refused[0])
    if int(np.__version__.split(".")[0]) >= 2:
        raise ServeError(f"numpy {np.__version__} corrupts tensors in this server's Python backend: install numpy<2")
    for kind, port in (("http", ports.http), ("grpc", ports.grpc), ("metrics", ports.metrics)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise ServeError(
                    f"port {port} on {host} cannot be used ({error.strerror}); choose another: --{kind}-port N"
                ) from error
    if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free < SHARED_MEMORY_NEEDED:
        free = shutil.disk_usage(SHARED_MEMORY).free >> 20
        raise ServeError(
            f"{SHARED_MEMORY} has {free} MB free; the Python backend needs {SHARED_MEMORY_NEEDED >> 20} MB: enlarge it "
            "(docker: --shm-size 1g) or remove what fills it"
        )


def _names(backends: Path) -> set[str]:
    """What `backends` holds. Raises ServeError where that is nothing."""
    libraries = {path.parent.name for path in backends.glob("*/libtriton_*.so")}
    found = libraries | {path.parent.name for path in backends.glob("*/model.py")}
    if not found:
        raise ServeError(f"{backends} holds no backend: expected NAME/libtriton_NAME.so in it")
    return found


def _not_here(repository: Path, backends: set[str], strict: bool) -> list[str]:
    """The models that this machine, or the embedded Triton with `backends`, cannot run.

    Raises RepositoryError for a configuration that cannot be read, where every model must load.
    """
    found = []
    here = backends | {"python"}
    for path in sorted(repository.glob("*/config.pbtxt")):
        name = path.parent.name
        try:
            config = parse(path.read_text("utf-8", "replace"), name)
        except RepositoryError:
            if strict:
                raise
            continue  # Triton does not load it either
        if config.backend and config.backend not in here:
            profile = "vllm" if config.backend == vllm.BACKEND else "gpu"
            found.append(
                f"{name}: the embedded Triton has no {config.backend}; serve it in the container: "
                f"docker compose --profile {profile} up"
            )
        elif any(path.parent.glob(f"*/{tensorrt_llm.MODEL_FILE}")):
            found.append(
                f"{name}: the embedded Triton has no TensorRT-LLM; serve it in the trtllm-python-py3 container"
            )
        elif any(group.kind == KIND_GPU for group in config.instance_group) and not gpus():
            found.append(f"{name} runs on a GPU and none is here; serve it where there is one, or build it for the CPU")
    return found


def _command(
    repository: Path, host: str, ports: Ports, place: Path, beside: Path
) -> tuple[list[str], dict[str, str], str]:
    """The command, its environment, and the prefix of its shared-memory regions."""
    wheel = wheel_folder()
    backends = place / "backends"
    for source in [*(wheel / "backends" / "python").iterdir(), _stub(wheel)]:
        if source.is_file():
            _copy(source, backends / "python" / source.name)
    for source in beside.glob("*/*"):
        if source.is_file():
            _copy(source, backends / source.parent.name / source.name)
    region = f"build_repo_{uuid.uuid4().hex[:12]}_"
    libraries = wheel.parent.parent / "nvidia_pytriton.libs"
    environment = {
        **os.environ,
        "PATH": f"{_interpreter(place) / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
        "LD_LIBRARY_PATH": f"{libraries}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}",
        "TOKENIZERS_PARALLELISM": "true",
    }
    command = [
        str(wheel / "bin" / "tritonserver"),
        f"--model-repository={_plain_path(repository.resolve(), place)}",
        f"--backend-directory={backends}",
        f"--backend-config=python,shm-region-prefix-name={region}",
        f"--cache-directory={wheel / 'caches'}",
        f"--cache-config=local,size={RESPONSE_CACHE}",
        f"--http-address={host}",
        f"--http-port={ports.http}",
        f"--grpc-address={host}",
        f"--grpc-port={ports.grpc}",
        f"--metrics-address={host}",
        f"--metrics-port={ports.metrics}",
        "--disable-auto-complete-config",
        *(
            f"--{option}={RESTRICTED}:key={uuid.uuid4()}"
            for option in ("grpc-restricted-protocol", "http-restricted-api")
        ),
    ]
    return command, environment, region


def _loading(strict: bool, controlled: bool, models: Sequence[str]) -> list[str]:
    """Load `models`, by options; under model control each can be loaded again."""
    options = [f"--exit-on-error={str(strict).lower()}", f"--strict-readiness={str(strict).lower()}"]
    return [*options, "--model-control-mode=explicit", *models] if controlled else options


def _refuse_others(host: str) -> None:
    if not _is_loopback(host):
        raise ServeError(
            f"the embedded Triton, {EMBEDDED}, does not listen on {host}: whoever reaches it can run code in it "
            "(CVE-2025-23319, mended in 25.07). Put the gateway on that address, build-repo gateway --host, use the "
            "container, or say that everybody there may: --insecure-bind"
        )


def _refuse_unsigned(repository: Path, key: Path) -> None:
    problems = unsigned(repository, key)
    if problems:
        raise ServeError(f"{problems[0]}. Nothing of {repository} is served; see all: build-repo verify")


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def _stub(wheel: Path) -> Path:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = wheel / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise ServeError(f"this Triton has no Python backend for Python {version}; use Python 3.11 or 3.12")
    return stub


def _interpreter(place: Path) -> Path:
    """A virtual environment of this interpreter and its packages that writes no bytecode: a served repository stays
    byte for byte as it was published.

    The stub's Python reads no environment variable; it is configured by the first python3 on PATH (PEP 405).
    """
    folder = place / "python"
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin" / "python3").symlink_to(os.path.realpath(sys.executable))
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n", "utf-8")
    lines = ["import sys; sys.dont_write_bytecode = True"]
    lines += [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "builder.pth").write_text("\n".join(lines), "utf-8")
    return folder


def _plain_path(repository: Path, place: Path) -> Path:
    """The repository, by a link where its path has characters that Triton's launch of Python would trip over."""
    if re.fullmatch(r"[\w./+=@~:-]+", str(repository)):
        return repository
    link = place / "model_repository"
    link.symlink_to(repository)
    return link


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)  # Triton refuses a library that is a link out of its folder


def die_with_parent() -> None:
    """In the child: be terminated when the parent dies, however it dies, so that no server is left behind."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _read(server: Server, echo: Callable[[str], None] | None) -> None:
    assert server.process.stdout is not None
    for line in server.process.stdout:
        server.log.append(line.rstrip())
        del server.log[:-LOG_LINES]
        if echo is not None:
            echo(line.rstrip())


def _wait_until_ready(server: Server, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    with grpc.InferenceServerClient(server.url) as client:
        while time.monotonic() < end:
            if server.process.poll() is not None:
                time.sleep(0.2)  # the reader takes in the last lines
                raise ServeError(why(server.log))
            try:
                if client.is_server_ready(client_timeout=1) and _answers(server.host, server.ports.metrics):
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


def why(log: list[str]) -> str:
    """The reason in a log why the server did not start, in a line."""
    failed = [line for line in log if re.search(r"failed to load '([^']+)'", line)]
    if failed:
        name = re.search(r"failed to load '([^']+)'", failed[0])
        reason = failed[0].split("failed to load", 1)[1].split(": ", 1)[-1]
        assert name is not None
        return f"the model {name[1]} does not load: {reason[:300]}. Check the repository: build-repo check"
    return f"Triton stopped: {last_error(log)}; -v shows its log"


def last_error(log: list[str]) -> str:
    """The last error in a log, in a line."""
    errors = [line.split("] ", 1)[-1] for line in log if line.startswith("E") or "error" in line.lower()]
    return errors[-1][:300] if errors else "it gave no reason"


def _stop(server: Server) -> None:
    """SIGTERM; then SIGKILL to the whole group, as soon as all that is left of the server only waits.

    Triton keeps the first request of a gRPC stream until the client closes the stream, and with it the model, for up
    to its exit timeout of 30 s (server, src/grpc/stream_infer_handler.cc, IsAsyncNotifyState).
    """
    process = server.process
    process.terminate()
    end = time.monotonic() + EXIT_TIMEOUT_S + 5
    while process.poll() is None and time.monotonic() < end and not _drained(server):
        time.sleep(0.1)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
