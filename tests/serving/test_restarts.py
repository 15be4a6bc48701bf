"""Answers of the gateway of `serve` while Triton or a model restarts."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tritonclient.grpc as grpc

from builder.serving.server.triton import free_ports
from tests.served.patience import comes_about
from tests.serving.commands import Served, descendants, put_echo, serving

PATH = "/v1/tasks/echo"


class Clients(threading.Thread):
    """Clients that send requests in a loop, each on a new connection; `refused`: responses without an answer."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.port, self.stopping = port, threading.Event()
        self.answers, self.refused = 0, list[tuple[int, str | None, str]]()

    def run(self) -> None:
        while not self.stopping.wait(0.01):
            status, retry, body = ask(self.port, "echo")
            if status == 200:
                self.answers += 1
            else:
                self.refused.append((status, retry, body))


def ask(port: int, model: str) -> tuple[int, str | None, str]:
    """Return the status, the Retry-After and the body of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        body = json.dumps({"model": model, "inputs": "a"})
        connection.request("POST", PATH, body, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.getheader("retry-after"), response.read().decode()
    finally:
        connection.close()


@contextmanager
def _asking(served: Served, port: int) -> Iterator[Clients]:
    clients = Clients(port)
    clients.start()
    try:
        assert comes_about(lambda: clients.answers > 5, 60), clients.refused[-1:]
        yield clients
        answered = clients.answers
        assert comes_about(lambda: clients.answers > answered + 5 or not clients.is_alive())
        assert clients.is_alive(), "a connection was refused: the gateway went down"
        assert clients.refused, "somebody asked meanwhile"
        assert {(status, bool(retry)) for status, retry, _ in clients.refused} == {(503, True)}, clients.refused
    finally:
        clients.stopping.set()
        clients.join()


def test_gateway_answers_503_while_triton_or_a_model_restarts(tmp_path: Path) -> None:
    """Regression: it answered 404, which clients do not retry, and exited with Triton."""
    port = free_ports().http
    repository = put_echo(tmp_path / "model_repository")
    with serving(repository, tmp_path / "output", "--openai-port", str(port)) as served:
        with _asking(served, port), grpc.InferenceServerClient(f"127.0.0.1:{served.ports.grpc}") as client:
            client.unload_model("echo")
            assert comes_about(lambda: ask(port, "echo")[0] == 503)
            assert ask(port, "other")[0] == 404
            client.load_model("echo")
        before = set(descendants(served.process.pid))
        with _asking(served, port):
            os.kill(served.triton, signal.SIGKILL)
            served.wait_until_ready(times=2)
        assert ask(port, "other")[0] == 404
        kept = before & set(descendants(served.process.pid))
        assert len(kept) == 1, "the gateway, and nothing of Triton"
        served.process.terminate()
        assert served.process.wait(120) == 0
        assert not [pid for pid in kept if Path(f"/proc/{pid}").exists()]
