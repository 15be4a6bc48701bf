"""Run the gateway's process over two real Tritons, of which one is killed under load and starts again."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from builder.serving.server.gateway import gateway
from builder.serving.server.triton import TritonServer, free_ports, running
from tests.served.patience import comes_about
from tests.serving.commands import PROGRAM, put_echo

SLOWER = PROGRAM.replace("        return [", "        time.sleep(0.02)\n        return [", 1).replace(
    "import", "import time\nimport", 1
)
CLIENTS = 12


@pytest.mark.slow
def test_killed_triton_fails_no_request_and_returns(tmp_path: Path) -> None:
    repository = put_echo(tmp_path / "model_repository")
    (repository / "echo" / "1" / "model.py").write_text(SLOWER)
    port, ports = free_ports().http, [free_ports() for _ in range(2)]
    with ExitStack() as stack:

        def start(number: int) -> TritonServer:
            return stack.enter_context(running(repository, ports=ports[number]))

        tritons = [start(number) for number in range(2)]
        with gateway(",".join(triton.url for triton in tritons), "127.0.0.1", port):
            statuses, stopping = Counter[int](), threading.Event()

            def client(number: int) -> None:
                while not stopping.is_set():
                    statuses[_ask(port, f"{number} asks")] += 1

            with ThreadPoolExecutor(CLIENTS) as clients:
                asking = [clients.submit(client, number) for number in range(CLIENTS)]
                try:
                    assert comes_about(lambda: statuses.total() > 50)
                    os.killpg(tritons[0].process.pid, signal.SIGKILL)
                    assert comes_about(lambda: _metric(port, "server_accepting", tritons[0].url) == 0)
                    reached = statuses.total()
                    assert comes_about(lambda: statuses.total() > reached + 50)
                    start(0)
                    assert comes_about(lambda: _metric(port, "server_accepting", tritons[0].url) == 1)
                    assert comes_about(lambda: _metric(port, "server_requests", tritons[0].url) > 0)
                finally:
                    stopping.set()
                for one in asking:
                    one.result()
            assert set(statuses) == {200}, statuses
            assert _metric(port, "server_retries_total", tritons[0].url) > 0, "requests were running on it"


def _ask(port: int, text: str) -> int:
    body = json.dumps({"inputs": text}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/tasks/echo", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert text in answer.read().decode()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def _metric(port: int, name: str, server: str) -> float:
    """Return a metric of one server, from the gateway."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    prefix = f'build_repo_gateway_{name}{{server="{server}"}} '
    (value,) = [float(line.removeprefix(prefix)) for line in lines if line.startswith(prefix)]
    return value
