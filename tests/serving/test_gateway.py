"""Supervision of a gateway beside a server, with a program that only listens in its place."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from builder.cli import main
from builder.common.errors import ServeError
from builder.serving.server import backoff
from builder.serving.server import gateway as gateway_module
from builder.serving.server.gateway import supervised_gateway
from builder.serving.server.triton import free_ports
from tests.served.patience import comes_about

LISTENS = """
import os, socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
file = sys.argv[sys.argv.index("--url") + 1]
open(file + ".new", "w").write(str(os.getpid()))
os.replace(file + ".new", file)
time.sleep(600)
"""

COUNTS_SIGNALS = (
    "import signal; signals = []; signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))"
    + LISTENS.replace("time.sleep(600)", "while not signals: time.sleep(0.01)")
    + "time.sleep(0.5); open(file + '.signals', 'w').write(str(len(signals)))"
)


@pytest.fixture
def listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return a function that returns the id of the listening process, which writes it to the file `url`."""
    monkeypatch.setattr(gateway_module, "GATEWAY_PROGRAM", LISTENS)

    def process() -> int:
        file = tmp_path / "url"
        assert comes_about(file.exists)
        return int(file.read_text())

    return process


def test_gateway_restarts_when_killed_and_not_when_stopped(listening: Callable[[], int], tmp_path: Path) -> None:
    lines: list[str] = []
    url, port = str(tmp_path / "url"), free_ports().http
    with supervised_gateway(url, "127.0.0.1", port, say=lines.append, poll_s=0.01):
        first = listening()
        os.kill(first, signal.SIGKILL)
        assert comes_about(lambda: listening() != first)
        second = listening()
    assert lines == ["the gateway ended, by SIGKILL; it is started again"]
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def test_restarted_gateway_gets_one_stop_signal(
    listening: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a restarted gateway got a second signal, at which it ends without answering running requests."""
    monkeypatch.setattr(gateway_module, "GATEWAY_PROGRAM", COUNTS_SIGNALS)
    stop = gateway_module._stop

    def stop_later(process: gateway_module.Process) -> None:
        time.sleep(0.1)  # so that two signals would not be one
        stop(process)

    monkeypatch.setattr(gateway_module, "_stop", stop_later)
    with supervised_gateway(str(tmp_path / "url"), "127.0.0.1", free_ports().http, say=lambda _: None, poll_s=0.01):
        first = listening()
        os.kill(first, signal.SIGKILL)
        assert comes_about(lambda: listening() != first)
    assert (tmp_path / "url.signals").read_text() == "1"


def test_gateway_that_cannot_start_is_reported_and_retried(
    listening: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example if the machine has no memory for another process."""
    lines: list[str] = []
    with supervised_gateway(str(tmp_path / "url"), "127.0.0.1", free_ports().http, say=lines.append, poll_s=0.01):
        first = listening()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "executable", str(tmp_path / "missing"))
            os.kill(first, signal.SIGKILL)
            assert comes_about(lambda: len(lines) >= 2, 20)
        assert comes_about(lambda: listening() != first, 20)
    again = "the gateway ended, by SIGKILL; it is started again"
    assert lines[:2] == [again, "the gateway cannot be started (No such file or directory)"]
    assert lines[2].startswith(again)


def test_gateway_stays_down_after_too_many_restarts(
    listening: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "MAX_RESTARTS", 1)
    lines: list[str] = []
    with supervised_gateway(str(tmp_path / "url"), "127.0.0.1", free_ports().http, say=lines.append, poll_s=0.01):
        monkeypatch.setattr(gateway_module, "GATEWAY_PROGRAM", "raise SystemExit(3)")
        os.kill(listening(), signal.SIGKILL)
        assert comes_about(lambda: len(lines) == 2)
    assert "the gateway ended, with status 3, once more: it stays down" in lines[1]


def test_gateway_whose_port_another_program_has_does_not_start(listening: Callable[[], int], tmp_path: Path) -> None:
    """Regression: the other program answered, and counted as the gateway."""
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(ServeError, match="the gateway stopped"),
        supervised_gateway(str(tmp_path / "url"), "127.0.0.1", other.getsockname()[1], say=print, poll_s=60),
    ):
        pass


def test_serve_refuses_a_gateway_port_in_use_before_loading_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builder.commands.serve.running", lambda *_, **__: pytest.fail("Triton was started"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", str(tmp_path), "--openai-port", str(port)]) == 1
    assert f"port {port} on 127.0.0.1 cannot be used" in (said := " ".join(capsys.readouterr().err.split()))
    assert "choose another: --openai-port N" in said
    assert main(["serve", str(tmp_path), "--openai-port", "9001", "--grpc-port", "9001"]) == 1
    assert "--openai-port is 9001, which is one of Triton's ports" in " ".join(capsys.readouterr().err.split())
