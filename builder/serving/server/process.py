"""Run a program in a process group of its own, read its output, and leave no process of the group behind.

Knows nothing about the program itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

import psutil

MAX_LOG_LINES = 10_000  # kept in memory
READ_TIMEOUT_S = 10.0  # time to read the last output of a program that ended
KILL_TIMEOUT_S = 10.0  # time for killed processes to disappear
PARENT_DEATH_SIGNAL, CHILD_SUBREAPER = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER of prctl(2)


@contextmanager
def process_group(
    command: Sequence[str], environment: Mapping[str, str], echo: Callable[[str], None] | None
) -> Iterator[tuple[subprocess.Popen[str], list[str], threading.Thread]]:
    """Start a program and read its output; at the end kill its remaining processes.

    Yields the process, the last lines of its output, and the thread that reads them. `echo` is called with each line.
    """
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None
    log: list[str] = []
    reader = threading.Thread(target=_keep_lines, args=(process.stdout, log, echo), daemon=True)
    reader.start()
    try:
        yield process, log, reader
    finally:
        end_group(process)
        reader.join(READ_TIMEOUT_S)


def describe_exit(status: int) -> str:
    """Describe how a process ended: "with status 1", "by SIGKILL"."""
    return f"with status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"


def _keep_lines(output: IO[str], log: list[str], echo: Callable[[str], None] | None) -> None:
    """Read the output to its end and close it here.

    Closing a stream that another thread reads would wait for its last writer to end.
    """
    with output:
        for line in output:
            log.append(line.rstrip())
            del log[:-MAX_LOG_LINES]
            if echo is not None:
                echo(line.rstrip())


def die_with_parent() -> None:
    """Make this child process end with its parent, however the parent dies, so that no server is left behind."""
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Adopt descendants whose parent dies, so that `end_group` can reap them.

    Otherwise the first process of the machine or container adopts them, and often reaps nothing.
    """
    ctypes.CDLL(None).prctl(CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(CHILD_SUBREAPER, 0)


def end_group(leader: subprocess.Popen[Any]) -> None:
    """Kill the process group of `leader`, and reap its members that are children of this process."""
    end = time.monotonic() + KILL_TIMEOUT_S
    while (group := _members(leader.pid)) and time.monotonic() < end:
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
        leader.poll()
        for member in group - {leader.pid}:
            with suppress(ChildProcessError):
                os.waitpid(member, os.WNOHANG)
        time.sleep(0.01)


def _members(leader: int) -> set[int]:
    """Return the processes of a group, without the dead ones that only another process can reap."""
    group = set()
    for pid in psutil.pids():
        with suppress(psutil.Error, OSError):  # it has ended
            if os.getpgid(pid) != leader:
                continue
            process = psutil.Process(pid)  # process_iter may return an earlier one of this pid
            if process.status() != psutil.STATUS_ZOMBIE or process.ppid() == os.getpid():
                group.add(pid)
    return group
