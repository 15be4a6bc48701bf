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

from builder.clusters.fleet.executor import BuildJob
from builder.clusters.fleet.work import run_job


def main() -> None:
    folder, connection, name = sys.argv[-3], Connection(int(sys.argv[-2])), sys.argv[-1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal: the parent decides what stops
    jobs: SimpleQueue[BuildJob] = SimpleQueue()
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # through SystemExit, so that the build cleans up
        threading.Thread(target=_receive, args=(connection, jobs), daemon=True).start()
        while True:
            connection.send(run_job(jobs.get(), name, connection.send))
    except SystemExit:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # because torch takes seconds to shut down


def _receive(connection: Connection, jobs: SimpleQueue[BuildJob]) -> None:
    try:
        while True:
            jobs.put(connection.recv())
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)
