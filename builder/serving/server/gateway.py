"""Run a gateway beside a server, in its own process, and restart it when it ends by itself."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import psutil

from builder.common.addresses import join_port
from builder.common.errors import ServeError
from builder.serving.server.backoff import restart_backoff
from builder.serving.server.process import describe_exit, die_with_parent
from builder.serving.server.watch import POLL_S

Process = subprocess.Popen[bytes]
GATEWAY_PROGRAM = "import sys; from builder.cli import main; sys.exit(main())"
START_TIMEOUT_S = 300  # a gateway that ends earlier is noticed at once
STOP_TIMEOUT_S = 65  # it drains running requests, within 60 seconds by default


@contextmanager
def gateway(
    triton: str,
    host: str,
    port: int,
    *more: str,
    log: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Process]:
    """Run `build-repo gateway` on `host`:`port` over the gRPC address `triton`; `more`: its other options.

    `log`: where its access log goes, as Popen takes it; by default to this process's standard output.
    `environment`: its variables; by default those of this process.
    Raises ServeError if it does not start; its own output gives the reason.
    """
    process = _start(_command(triton, host, port, *more), log, environment)
    try:
        _wait(process, host, port)
        yield process
    finally:
        _stop(process)


@contextmanager
def supervised_gateway(
    triton: str, host: str, port: int, *more: str, say: Callable[[str], None], poll_s: float = POLL_S
) -> Iterator[None]:
    """Run a gateway and restart it if it ends by itself, up to a limit; check every `poll_s`. `say` prints a line."""
    supervisor = GatewaySupervisor(lambda: _start(_command(triton, host, port, *more)), say, poll_s)
    try:
        _wait(supervisor.process, host, port)
        supervisor.start()
        yield
    finally:
        supervisor.stopping.set()
        if supervisor.is_alive():
            supervisor.join()
        _stop(supervisor.process)


class GatewaySupervisor(threading.Thread):
    """Thread that restarts a process until `stopping` is set, and then stops it.

    It stops the process itself: if a thread ends before a process that it started, `die_with_parent` sends a signal
    beside that of `_stop`, and a gateway ends at once on the second one.
    """

    def __init__(self, start: Callable[[], Process], say: Callable[[str], None], poll_s: float) -> None:
        super().__init__(name="supervisor of the gateway", daemon=True)
        self.process, self.start_process, self.say, self.poll_s = start(), start, say, poll_s
        self.stopping, self.backoff = threading.Event(), restart_backoff()

    def run(self) -> None:
        while not self.stopping.wait(self.poll_s):
            status = self.process.poll()
            if status is None:
                continue
            ended = f"the gateway ended, {describe_exit(status)}"
            delay = self.backoff.fail(time.monotonic(), first_at_once=True)
            if math.isinf(delay):
                self.say(f"{ended}, once more: it stays down after {self.backoff.max_failures} attempts")
                break
            self.say(f"{ended}; it is started again" + (f" in {delay:g} s" if delay else ""))
            if self.stopping.wait(delay):
                break
            try:
                self.process = self.start_process()
            except OSError as error:  # the next check counts it as another end
                self.say(f"the gateway cannot be started ({error.strerror or error})")
        _stop(self.process)


def _command(triton: str, host: str, port: int, *more: str) -> list[str]:
    options = ["--url", triton, "--host", host, "--port", str(port), *more]
    return [sys.executable, "-c", GATEWAY_PROGRAM, "gateway", *options]


def _start(command: Sequence[str], log: int | None = None, environment: Mapping[str, str] | None = None) -> Process:
    return subprocess.Popen(command, stdout=log, env=environment, start_new_session=True, preexec_fn=die_with_parent)


def _stop(process: Process) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(process: Process, host: str, port: int) -> None:
    end = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ServeError(f"the gateway stopped, with status {process.returncode}; what it wrote above says why")
        if _listens(process, port):
            return
        time.sleep(0.05)
    raise ServeError(
        f"the gateway does not listen on {join_port(host, port)} after {START_TIMEOUT_S} s; what it wrote above may "
        "say why"
    )


def _listens(process: Process, port: int) -> bool:
    """Return True if this process listens on `port`, and not another program."""
    try:
        connections = psutil.Process(process.pid).net_connections("tcp")
    except psutil.Error:  # it has ended
        return False
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections)
