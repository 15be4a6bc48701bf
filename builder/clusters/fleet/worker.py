"""Process that builds the jobs of a connection, one by one.

Its last three arguments: its folder for temporary files, the connection's number, and its name.

It ends when the connection does: when the process that started it has no more to build, or has ended.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from multiprocessing.connection import Connection
from queue import SimpleQueue

from builder.clusters.fleet.executor import Job
from builder.clusters.fleet.work import carry_out


def main() -> None:
    folder, connection, name = sys.argv[-3], Connection(int(sys.argv[-2])), sys.argv[-1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal: the parent decides what stops
    jobs: SimpleQueue[Job] = SimpleQueue()
    try:
        signal.signal(signal.SIGTERM, _leave)
        threading.Thread(target=_receive, args=(connection, jobs), daemon=True).start()
        while True:
            connection.send(carry_out(jobs.get(), name, connection.send))
    except SystemExit:  # what the build had begun is undone
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # because torch takes seconds to shut down


def _receive(connection: Connection, jobs: SimpleQueue[Job]) -> None:
    try:
        while True:
            jobs.put(connection.recv())
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)


def _leave(*_: object) -> None:
    """Exit through SystemExit, so that what was begun is undone."""
    sys.exit()
