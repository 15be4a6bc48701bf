"""Run `build-repo serve` in a process, on a model that echoes its input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from builder.serving.server.process import end_group
from builder.serving.server.triton import Ports, free_ports
from tests.served.patience import comes_about

CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 4
input {{ name: "text_input" data_type: TYPE_STRING dims: [1] }}
output {{ name: "label" data_type: TYPE_STRING dims: [1] }}
parameters {{ key: "task" value {{ string_value: "echo" }} }}
parameters {{ key: "labels" value {{ string_value: "[\\"a\\"]" }} }}
"""
PROGRAM = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._answer(pb_utils.get_input_tensor_by_name(request, "text_input")) for request in requests]

    def _answer(self, texts):
        return pb_utils.InferenceResponse([pb_utils.Tensor("label", texts.as_numpy())])
"""
COMMAND = """
import sys
from builder.cli import main
from builder.serving.server import heartbeat
heartbeat.PERIOD_S, heartbeat.REQUEST_TIMEOUT_S = 0.2, 2.0
sys.exit(main())
"""


def put_echo(repository: Path, name: str = "echo") -> Path:
    """Write the echo model to a repository; return the repository."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(name=name))
    (repository / name / "1" / "model.py").write_text(PROGRAM)
    return repository


@dataclass
class Served:
    """Running command with its output and the ports of its Triton."""

    process: subprocess.Popen[str]
    ports: Ports
    file: Path

    @property
    def output(self) -> str:
        return self.file.read_text()

    @property
    def triton(self) -> int:
        """Return the process of the running tritonserver."""
        (process,) = [pid for pid in descendants(self.process.pid) if b"/bin/tritonserver" in _arguments(pid)[0]]
        return process

    def wait_until_ready(self, times: int = 1) -> None:
        """Wait until the command has reported readiness that many times."""
        assert comes_about(lambda: self.output.count("ready; stop") >= times or self.process.poll() is not None)
        assert self.process.poll() is None, self.output


@contextmanager
def serving(repository: Path, file: Path, *options: str) -> Iterator[Served]:
    """Run `build-repo serve` until the end of the block, with its output in `file`; wait until it is ready."""
    ports = free_ports()
    numbers = [f"--{kind}-port={port}" for kind, port in vars(ports).items()]
    command = [sys.executable, "-c", COMMAND, "serve", str(repository), *numbers, *options]
    with (
        file.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output, text=True, start_new_session=True) as process,
    ):
        served = Served(process, ports, file)
        try:
            served.wait_until_ready()
            yield served
        finally:
            left = descendants(process.pid)
            end_group(process)
            for pid in left:
                _kill(pid)


def descendants(process: int) -> list[int]:
    """Return all descendants of a process."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text().rsplit(")", 1)[1].split()[1]
        except OSError:
            continue
        if int(parent) == process:
            children.append(int(stat.parent.name))
    return [*children, *(grandchild for child in children for grandchild in descendants(child))]


def _arguments(process: int) -> Sequence[bytes]:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return [b""]


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
