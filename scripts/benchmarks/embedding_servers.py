"""Other servers of embeddings over HTTP, and a closed loop of keep-alive connections to them."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from builder.common.machine import available_cores
from builder.serving.server.triton import free_ports
from scripts.benchmarks import peers

STARTING_S = 600  # some servers convert their model first
INFINITY = {"torch": "infinity_peer", "optimum": "infinity_optimum_peer"}  # its engines: their environments


@dataclass(frozen=True)
class Door:
    """Endpoint of a server that embeds a text, the JSON that it expects, and the numbers of its answer.

    `numbers` is OpenAI's shape unless a server has another.
    """

    port: int
    path: str
    body: Callable[[str], dict[str, Any]]
    numbers: Callable[[bytes], list[float]] = lambda content: json.loads(content)["data"][0]["embedding"]

    def ask(self, connection: http.client.HTTPConnection, text: str) -> bytes:
        """Return the content of the answer. Raises RuntimeError if it is an error."""
        connection.request("POST", self.path, json.dumps(self.body(text)), {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read()
        if response.status != 200:
            raise RuntimeError(content.decode()[:200])
        return content

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port)


def fastapi(folder: Path) -> Any:
    """Run FastAPI over transformers' pipeline."""
    port = free_ports().http
    command = [sys.executable, "-m", "uvicorn", "scripts.benchmarks.fastapi_app:app", "--port", str(port)]
    door = Door(port, "/embed", lambda text: {"text": text})
    return serving([*command, "--log-level", "warning"], door, {"MODEL": str(folder)})


def infinity(folder: Path, engine: str, environments: Path, pooling: str = "mean") -> Any:
    """Run the embedding server infinity with its own dynamic batching; `engine`: one of INFINITY.

    Its optimum engine takes the first token's vector unless `pooling` is mean; its torch engine reads the folder.
    """
    if engine == "optimum":
        export_onnx(folder, environments)
    port = free_ports().http
    command = [str(_program(INFINITY[engine], "infinity_emb", environments)), "v2", "--model-id", str(folder)]
    command += [
        "--served-model-name",
        "m",
        "--engine",
        engine,
        "--pooling-method",
        pooling if pooling in ("mean", "cls") else "auto",
        "--device",
        "cpu",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    door = Door(port, "/embeddings", lambda text: {"model": "m", "input": [text]})
    return serving([*command, "--log-level", "error"], door, {})


def export_onnx(folder: Path, environments: Path) -> None:
    """Export the checkpoint with Optimum into onnx/ beside it. Raises PeerError."""
    if not (folder / "onnx").exists():
        program = _program("retrieval_onnx", "optimum-cli", environments)
        command: list[str | Path] = [program, "export", "onnx", "--task", "feature-extraction"]
        peers.run_command([*command, "--model", folder, folder / "onnx"])


def _program(environment: str, name: str, environments: Path) -> Path:
    return peers.interpreter(environment, environments).with_name(name).absolute()


@contextmanager
def serving(command: Sequence[str], door: Door, environment: dict[str, str]) -> Iterator[Door]:
    """Start a server with `command` and yield it once it answers.

    Raises RuntimeError with the server's last line if it does not answer.
    """
    environment = {**os.environ, **environment, "OMP_NUM_THREADS": str(available_cores())}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            if not _answers(process, door):
                log.seek(0)
                last = log.read().decode().strip().splitlines()[-1:] or ["no output"]
                raise RuntimeError(f"{Path(command[0]).name} did not start: {last[0][:200]}")
            yield door
        finally:
            process.terminate()
            process.wait()


def _answers(process: subprocess.Popen[bytes], door: Door) -> bool:
    end = time.perf_counter() + STARTING_S
    while time.perf_counter() < end and process.poll() is None:
        try:
            door.ask(door.connect(), "ready?")
            return True
        except OSError:
            time.sleep(0.2)
    return False


def closed_loop(door: Door, texts: Sequence[str], concurrency: int, seconds: float) -> tuple[float, float, float]:
    """Return the requests a second and the p50 and p99 in milliseconds, after one connection has warmed up.

    The warm-up is 8 requests, or as many as `seconds` allow. Raises RuntimeError if an answer is an error.
    """
    warm, end = door.connect(), time.perf_counter() + seconds
    for text in texts[:8]:
        door.ask(warm, text)
        if time.perf_counter() > end:
            break
    end = time.perf_counter() + seconds

    def loop(index: int) -> list[float]:
        connection, times = door.connect(), []
        position = index * len(texts) // concurrency
        while time.perf_counter() < end:
            start = time.perf_counter()
            door.ask(connection, texts[position % len(texts)])
            times.append(time.perf_counter() - start)
            position += 1
        return times

    started = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as clients:
        times = list(clients.map(loop, range(concurrency)))
    elapsed = time.perf_counter() - started
    spent = np.concatenate(times) * 1000
    p50, p99 = np.percentile(spent, [50, 99]).tolist()
    return len(spent) / elapsed, p50, p99
