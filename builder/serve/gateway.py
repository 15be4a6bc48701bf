"""A gateway beside a server, in a process of its own, which is started again when it ends by itself."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from builder.errors import ServeError
from builder.serve.process import die_with_parent
from builder.serve.watch import ATTEMPTS, POLL_S, Restarts, how

Process = subprocess.Popen[bytes]
PROGRAM = "import sys; from builder.cli import main; sys.exit(main())"
START_S = 300  # one that ends meanwhile is noticed at once
STOP_S = 65  # it finishes what runs, in 60 seconds unless it is told otherwise


@contextmanager
def gateway(triton: str, host: str, port: int, *more: str) -> Iterator[Process]:
    """`build-repo gateway` on `host`:`port` over the gRPC address `triton`, until the end; `more`: its other options.

    Raises ServeError where it does not start; it has said why itself.
    """
    process = _started(triton, host, port, *more)
    try:
        _wait(process, host, port)
        yield process
    finally:
        _stop(process)


@contextmanager
def kept_gateway(
    triton: str, host: str, port: int, *more: str, say: Callable[[str], None], poll_s: float = POLL_S
) -> Iterator[None]:
    """The same, which is started again when it ends by itself, with a limit; `say` is told. Looks each `poll_s`."""
    start = partial(_started, triton, host, port, *more)
    process = start()
    try:
        _wait(process, host, port)
    except BaseException:
        _stop(process)
        raise
    keeper = Keeper(process, start, say, poll_s)
    keeper.start()
    try:
        yield
    finally:
        keeper.stopping.set()
        keeper.join()


class Keeper(threading.Thread):
    """Starts a process again, and stops it in the end: one that it started is told to stop when this thread ends."""

    def __init__(
        self, process: Process, start: Callable[[], Process], say: Callable[[str], None], poll_s: float
    ) -> None:
        super().__init__(name="keeper of the gateway", daemon=True)
        self.process, self.start_again, self.say, self.poll_s = process, start, say, poll_s
        self.stopping, self.restarts = threading.Event(), Restarts()

    def run(self) -> None:
        while not self.stopping.wait(self.poll_s):
            status = self.process.poll()
            if status is None:
                continue
            delay = self.restarts.delay(time.monotonic())
            if delay is None:
                self.say(f"the gateway ended, {how(status)}, once more: it stays down after {ATTEMPTS} attempts")
                break
            self.say(f"the gateway ended, {how(status)}; it is started again" + (f" in {delay:g} s" if delay else ""))
            if not self.stopping.wait(delay):
                self._start_again()
        _stop(self.process)

    def _start_again(self) -> None:
        """Where that fails, the next look counts it as another end."""
        try:
            self.process = self.start_again()
        except OSError as error:
            self.say(f"the gateway cannot be started ({error.strerror or error})")


def _started(triton: str, host: str, port: int, *more: str) -> Process:
    command = [sys.executable, "-c", PROGRAM, "gateway", "--url", triton, "--host", host, "--port", str(port), *more]
    return subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent)


def _stop(process: Process) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(process: Process, host: str, port: int) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ServeError(f"the gateway stopped, with status {process.returncode}; what it wrote above says why")
        try:
            socket.create_connection((host, port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise ServeError(f"the gateway does not listen on {host}:{port} after {START_S} s; what it wrote above may say why")
