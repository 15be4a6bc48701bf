"""Restarts of models and servers, with processes that imitate Triton's."""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from builder.common.errors import ServeError
from builder.serving.server import watch
from builder.serving.server.backoff import MAX_RESTARTS, restart_backoff
from builder.serving.server.stubs import Stubs
from builder.serving.server.triton import Ports, TritonServer
from builder.serving.server.watch import Watcher, keep_running
from tests.signing import write_keys

# A parent that never reaps its children, like tritonserver; it ends when its standard input closes.
PARENT = """
import os, subprocess, sys
end = ["-f", "--pid", str(os.getpid())]  # of tail, which stands for a stub: with its parent
stubs = [
    subprocess.Popen(["triton_python_backend_stub", model, *end], executable="/usr/bin/tail", stdout=subprocess.DEVNULL)
    for model in sys.argv[1:]
]
print("ready", flush=True)
sys.stdin.read()
for stub in stubs:
    stub.kill()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TritonServer]:
    """Return a fake server with two models of one process each, and no decode loop."""
    models = []
    for name in ("front", "engine"):
        models.append(tmp_path / name / "1" / "model.py")
        models[-1].parent.mkdir(parents=True)
        models[-1].touch()
    command = [sys.executable, "-c", PARENT, *map(str, models)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield TritonServer("127.0.0.1", Ports(0, 0, 0), process, [], True)
        process.communicate()


@pytest.fixture
def controlled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return the commands to the server in order; all of them succeed."""
    calls: list[tuple[str, str]] = []

    def control(self: Watcher, verb: str, name: str) -> str:
        calls.append((verb, name))
        return ""

    monkeypatch.setattr(Watcher, "_control", control)
    return calls


def _kill(server: TritonServer, model: str) -> int:
    (stub,) = [stub for stub in Stubs(server.process.pid).find() if stub.model == model]
    os.kill(stub.pid, signal.SIGKILL)
    end = time.monotonic() + 300
    while not stub.is_zombie and time.monotonic() < end:
        time.sleep(0.01)
    return stub.pid


def test_watcher_reloads_a_model_whose_process_was_killed(
    server: TritonServer, controlled: list[tuple[str, str]]
) -> None:
    lines: list[str] = []
    watcher = Watcher(server, lines.append)
    watcher.look()
    assert controlled == []
    killed = _kill(server, "engine")
    for _ in range(4):
        watcher.look()
    assert controlled == [("unload", "engine"), ("load", "engine")]
    assert watcher.reloads == {"engine": 1}
    assert lines[0] == f"engine: its process {killed} died; it is loaded again"
    assert re.fullmatch(r"engine: loaded again in \d+\.\d s, for the 1st time", lines[1])


def test_watcher_does_not_reload_an_unsigned_model(server: TritonServer, tmp_path: Path) -> None:
    """The files may have changed since the server started."""
    _, public = write_keys(tmp_path)
    repository = tmp_path / "model_repository"
    for name in ("engine", "another"):
        (repository / name / "1").mkdir(parents=True)
    watcher = Watcher(replace(server, repository=repository, verify_key=public), lambda text: None)
    assert watcher._control("load", "engine").startswith("engine: version 1 is not signed")


class FakeIndex:
    """Triton's index of the versions of the model "engine"."""

    states: ClassVar[dict[str, str]] = {}

    def __init__(self, url: str) -> None:
        self.models = [SimpleNamespace(name="engine", version=number, state=now) for number, now in self.states.items()]

    def __enter__(self) -> FakeIndex:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def get_model_repository_index(self, client_timeout: float) -> FakeIndex:
        assert client_timeout <= 10, "the other models are not watched meanwhile"
        return self


@pytest.mark.parametrize(
    ("states", "again"),
    [
        ({"1": "UNLOADING", "2": "READY"}, False),
        ({"1": "UNAVAILABLE", "2": "READY"}, False),
        ({"1": "READY", "2": "READY"}, True),
        ({"1": "READY", "2": "UNLOADING"}, True),
        ({"1": "UNAVAILABLE"}, True),
    ],
)
def test_watcher_ignores_the_dead_process_of_a_replaced_version(
    states: dict[str, str],
    again: bool,
    server: TritonServer,
    controlled: list[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeIndex, "states", states)
    monkeypatch.setattr("builder.serving.server.watch.grpc.InferenceServerClient", FakeIndex)
    watcher = Watcher(server, lambda text: None)
    watcher.look()
    _kill(server, "engine")
    for _ in range(4):
        watcher.look()
    assert (controlled == [("unload", "engine"), ("load", "engine")]) == again
    assert again or controlled == []


def test_watcher_restarts_a_server_without_model_control(
    server: TritonServer, controlled: list[tuple[str, str]]
) -> None:
    watcher = Watcher(replace(server, controlled=False), lambda text: None)
    watcher.look()
    _kill(server, "engine")
    for _ in range(3):
        watcher.look()
    assert controlled == []
    assert server.process.wait(timeout=300) == -signal.SIGTERM


def test_watcher_gives_up_on_a_model_after_five_failed_loads(
    server: TritonServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    lines: list[str] = []
    now = 1000.0

    def control(self: Watcher, verb: str, name: str) -> str:
        calls.append((verb, round(now - 1000)))
        return "no memory" if verb == "load" else ""

    monkeypatch.setattr(Watcher, "_control", control)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watcher = Watcher(server, lines.append)
    watcher.look()
    _kill(server, "front")
    for _ in range(100):
        watcher.look()
        now += 1
    loads = [when for verb, when in calls if verb == "load"]
    assert len(loads) == MAX_RESTARTS
    gaps = [after - before for before, after in itertools.pairwise(loads)]
    assert gaps == sorted(gaps), "each wait is longer than the one before"
    assert "front: it does not load (no memory); it is loaded again in 1 s" in lines
    assert "it stays unloaded after 5 attempts" in lines[-1]
    assert calls[-1][0] == "unload"


def test_watcher_reloads_a_failed_decode_loop(
    server: TritonServer, controlled: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Metrics:
        def __enter__(self) -> Metrics:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def read(self) -> bytes:
            return (
                b'build_repo_healthy{model="front",version="2"} 0\nbuild_repo_healthy{model="engine",version="1"} 1\n'
            )

    monkeypatch.setattr(urllib.request, "urlopen", lambda *arguments, **options: Metrics())
    lines: list[str] = []
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    fresh, watcher = Watcher(server, lines.append, started=now), Watcher(server, lines.append, started=now - 60)
    fresh.look()
    assert controlled == [], "it had no time yet to say how it is"
    for _ in range(3):
        watcher.look()
    assert controlled == [("unload", "front"), ("load", "front")], "and not again before it had time to say so"
    assert lines[0] == "front: its decode loop failed; it is loaded again"


def test_backoff_doubles_and_forgets_failures_after_a_while() -> None:
    backoff = restart_backoff()
    delays = [backoff.fail(10.0 * n, first_at_once=True) for n in range(7)]
    assert delays == [0, 1, 3, 7, 15, math.inf, math.inf]
    assert backoff.fail(60.0 + backoff.steady_s, first_at_once=True) == 0


def test_keep_running_restarts_a_server_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[TritonServer | None] = []
    lines: list[str] = []
    slept: list[float] = []

    @contextmanager
    def start() -> Iterator[TritonServer]:
        if len(started) == 2:
            started.append(None)
            raise ServeError("port 8000 is taken")
        with subprocess.Popen(["sh", "-c", "kill -ABRT $$"], text=True) as process:
            yield TritonServer("127.0.0.1", Ports(), process, ["E1 x] error: std::length_error"], True)

    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(watch, "POLL_S", 0)
    monkeypatch.setattr(Watcher, "look", lambda self: None)
    with pytest.raises(ServeError, match=r"by SIGABRT: error: std::length_error; that was the 6th time in a row"):
        keep_running(start, started.append, lines.append)
    assert len(started) == 1 + MAX_RESTARTS
    assert lines[0] == "Triton ended by itself, by SIGABRT: error: std::length_error; it is started again"
    assert lines[2] == "port 8000 is taken; it is started again in 3 s"
    assert [seconds for seconds in slept if seconds] == [1, 3, 7, 15]


def test_keep_running_does_not_retry_the_first_start() -> None:
    def start() -> AbstractContextManager[TritonServer]:
        raise ServeError("holds no model")

    with pytest.raises(ServeError, match="holds no model"):
        keep_running(start, lambda server: None, lambda text: None)
