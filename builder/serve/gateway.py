"""A gateway beside a server, in a process of its own."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from builder.errors import ServeError
from builder.serve.triton import die_with_parent

PROGRAM = "import sys; from builder.cli import main; sys.exit(main())"
START_S = 300  # one that ends meanwhile is noticed at once
STOP_S = 65  # it finishes what runs, in 60 seconds unless it is told otherwise


@contextmanager
def gateway(triton: str, host: str, port: int, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """`build-repo gateway` on `host`:`port` over the gRPC address `triton`, until the end; `more`: its other options.

    Raises ServeError where it does not start; it has said why itself.
    """
    command = [sys.executable, "-c", PROGRAM, "gateway", "--url", triton, "--host", host, "--port", str(port), *more]
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_parent)
    try:
        _wait(process, host, port)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], host: str, port: int) -> None:
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
