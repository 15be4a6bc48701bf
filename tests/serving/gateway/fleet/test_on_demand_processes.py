"""Run the gateway's process with models on demand over three real Tritons, of which one is killed under load."""

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
from random import Random

import pytest

from builder.serving.server.gateway import gateway
from builder.serving.server.triton import free_ports, running
from tests.served.patience import comes_about
from tests.serving.commands import PROGRAM, put_echo

NAMED = (
    PROGRAM.replace(
        "    def execute",
        "    def initialize(self, args):\n"
        '        self.name = args["model_name"]\n'
        '        self.weights = b"x" * (100 << 20)\n\n'
        "    def execute",
    )
    .replace(
        "texts.as_numpy()",
        'np.array([[f"{self.name} {text[0].decode()}".encode()] for text in texts.as_numpy()], object)',
    )
    .replace("import", "import numpy as np\nimport", 1)
)
NAMES = [f"echo{number}" for number in range(8)]
MEMORY_GB = 0.42  # a server and two models of about 0.14 GB each
CLIENTS = 6


@pytest.mark.slow
def test_killed_triton_fails_no_request_for_models_on_demand(tmp_path: Path) -> None:
    repository = tmp_path / "model_repository"
    for name in NAMES:
        put_echo(repository, name)
        (repository / name / "1" / "model.py").write_text(NAMED)
    port = free_ports().http
    with ExitStack() as stack:
        tritons = [stack.enter_context(running(repository, on_demand=True)) for _ in range(3)]
        options = ("--load-on-demand", "--repository", str(repository), "--memory-gb", str(MEMORY_GB))
        stack.enter_context(gateway(",".join(triton.url for triton in tritons), "127.0.0.1", port, *options))
        outcomes, stopping = Counter[str](), threading.Event()

        def client(number: int) -> None:
            random = Random(number)
            while not stopping.is_set():
                outcomes[ask(port, random.choice(NAMES), f"{number} asks")] += 1

        with ThreadPoolExecutor(CLIENTS) as clients:
            asking = [clients.submit(client, number) for number in range(CLIENTS)]
            try:
                assert comes_about(lambda: _loaded(port) >= 5 and outcomes.total() > 20), "the memory of all is used"
                os.killpg(tritons[0].process.pid, signal.SIGKILL)
                reached = outcomes.total()
                assert comes_about(lambda: outcomes.total() > reached + 30)
            finally:
                stopping.set()
            for one in asking:
                one.result()
        assert set(outcomes) == {"right"}, outcomes
        assert metric(port, "model_evictions_total") > 0


def ask(port: int, name: str, text: str) -> str:
    body = json.dumps({"model": name, "inputs": text}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/tasks/echo", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return "right" if f"{name} {text}" in answer.read().decode() else "wrong"
    except urllib.error.HTTPError as error:
        return error.read().decode()


def _loaded(port: int) -> float:
    return metric(port, "resident_models")


def metrics_of(port: int) -> list[str]:
    """Return the lines of a gateway's /metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return answer.read().decode().splitlines()  # type: ignore[no-any-return]


def metric(port: int, name: str) -> float:
    lines = metrics_of(port)
    prefix = f"build_repo_gateway_{name} "
    (value,) = [float(line.removeprefix(prefix)) for line in lines if line.startswith(prefix)]
    return value
