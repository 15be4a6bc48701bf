"""The heartbeat kills only servers that hang."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc as raw
import numpy as np
import pytest
import tritonclient.grpc as grpc

from builder.repository.config.arguments import EXIT_TIMEOUT_S
from builder.repository.liveness import NAME, ask_command, send_command
from builder.serving.server import heartbeat as module
from builder.serving.server.heartbeat import MAX_SILENCE_S, MAX_TIMEOUTS, PERIOD_S, REQUEST_TIMEOUT_S, heartbeat
from builder.serving.server.triton import Ports, TritonServer, free_ports, running
from tests.served.patience import comes_about
from tests.serving.commands import PROGRAM, put_echo

# A server that hangs like tritonserver: its gRPC port accepts connections and never answers; its health is 200.
HANGS = """
import socket, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

silent = socket.create_server(("127.0.0.1", int(sys.argv[1])))
server = HTTPServer(("127.0.0.1", int(sys.argv[2])), Health)
print("ready", flush=True)
server.serve_forever()
"""
SLOW = PROGRAM.replace("        return [", "        time.sleep(0.05)\n        return [", 1).replace(
    "import triton", "import time\nimport triton", 1
)
REQUESTS = 100


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PERIOD_S", 0.05)
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", 0.5)


@contextmanager
def _hanging() -> Iterator[TritonServer]:
    ports = free_ports()
    command = [sys.executable, "-c", HANGS, str(ports.grpc), str(ports.http)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield TritonServer("127.0.0.1", ports, process, [], True)
        finally:
            process.kill()


def test_heartbeat_kills_a_healthy_server_whose_grpc_hangs() -> None:
    """Regression: readiness over HTTP was 200 for hours while no request was answered."""
    said: list[str] = []
    with _hanging() as server, heartbeat(server, said.append) as beats:
        assert server.process.wait(60) < 0
        assert beats.killed
    assert len(said) == 1


def test_heartbeat_spares_a_stopping_server() -> None:
    with _hanging() as server:
        with heartbeat(server, lambda text: None) as beats:
            pass
        beats.join(60)
        assert server.process.poll() is None
        assert not beats.killed


def test_heartbeat_detects_a_hang_within_22_s() -> None:
    assert MAX_TIMEOUTS * (PERIOD_S + REQUEST_TIMEOUT_S) <= 22
    assert MAX_TIMEOUTS >= 2
    assert MAX_SILENCE_S > EXIT_TIMEOUT_S, "a server that is told to end finishes what runs"


def test_heartbeat_gives_more_time_to_a_server_that_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = raw.server(ThreadPoolExecutor(1))  # without any method
    port = refusing.add_insecure_port("127.0.0.1:0")
    refusing.start()
    with subprocess.Popen(["sleep", "600"], text=True) as process:
        server = TritonServer("127.0.0.1", Ports(1, port, 1), process, [], True)
        try:
            with heartbeat(server, lambda text: None) as beats:
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(2 * MAX_TIMEOUTS * (0.05 + 0.5))
                assert not beats.killed
                monkeypatch.setattr(module, "MAX_SILENCE_S", 0.0)
                assert process.wait(60) < 0
        finally:
            process.kill()
            refusing.stop(None)


@pytest.mark.parametrize("on_demand", [False, True])
def test_liveness_answers_while_requests_queue_and_is_not_listed(
    tmp_path: Path, on_demand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy server still answers the liveness model, and so does one without other models."""
    monkeypatch.setattr(module, "REQUEST_TIMEOUT_S", REQUEST_TIMEOUT_S)
    repository = put_echo(tmp_path / "model_repository")
    (repository / "echo" / "1" / "model.py").write_text(SLOW)
    with running(repository, on_demand=on_demand, liveness=True) as server:
        assert NAME not in {model.name for model in server.models()}
        with heartbeat(server, lambda text: None) as beats, grpc.InferenceServerClient(server.url) as client:
            client.load_model("echo")
            text = grpc.InferInput("text_input", [1, 1], "BYTES")
            text.set_data_from_numpy(np.array([[b"a"]], np.object_))
            answers: list[object] = []
            for _ in range(REQUESTS):
                client.async_infer("echo", [text], lambda result, error: answers.append(error))
            asked = subprocess.run(["sh", "-c", ask_command(server.url, 60)], check=False)
            assert asked.returncode == 0
            assert len(answers) < REQUESTS, "it answered before those that wait"
            assert comes_about(lambda: len(answers) == REQUESTS)
            assert answers == [None] * REQUESTS
            assert beats.is_alive()
            assert not beats.killed


def test_ask_command_fails_on_a_hung_or_missing_server() -> None:
    with _hanging() as server:
        assert subprocess.run(["sh", "-c", ask_command(server.url, 1)], check=False).returncode != 0
        assert subprocess.run(["sh", "-c", send_command(server.url, 1)], check=False).returncode == 28
    nowhere = TritonServer("127.0.0.1", Ports(1, 1, 1), server.process, [], True)
    assert subprocess.run(["sh", "-c", ask_command(nowhere.url, 1)], check=False).returncode != 0
    assert subprocess.run(["sh", "-c", send_command(nowhere.url, 1)], check=False).returncode == 7
