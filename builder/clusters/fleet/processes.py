"""Executor of this machine: processes that keep torch loaded and run build after build.

Each runs `run_worker`, with a connection to this process. One that dies fails the model that it builds, and is
replaced. When this process ends, in whatever way, they end too.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue

import psutil

from builder.clusters.fleet.executor import BuildJob, BuildOutcome, BuildProgress
from builder.clusters.fleet.work import run_job
from builder.common.distribution import PACKAGE
from builder.common.machine import available_cores

# The worker must import this package: -m would prefer one of the same name in the user's current folder.
PROGRAM = (
    "import sys; sys.path[:0] = {sys.argv[1]} - {*sys.path}; from builder.clusters.fleet.processes import run_worker; "
    "run_worker()"
)
LOADING = "loading torch"  # the stage before the first
ERROR_LOG = "errors.txt"  # in a worker's folder: the output of libraries, which may explain its death
MAX_IDLE_BYTES = 1_500_000_000  # a larger idle worker is replaced: each build leaves some, torch alone takes 500 MB
STOP_TIMEOUT_S = 10.0  # for a worker to end after SIGTERM


@dataclass(frozen=True)
class ProcessExecutor:
    """Executor of at most `workers` processes, whose builds together take at most `memory` bytes and `cores`.

    A build that needs more than that runs alone. `verbose`: show the output of libraries.
    """

    workers: int
    memory: int
    cores: int = field(default_factory=available_cores)
    verbose: bool = False

    def run(self, jobs: Sequence[BuildJob]) -> Generator[BuildProgress | BuildOutcome, None, None]:
        """Build jobs as Executor.run describes."""
        waiting, pool = list(jobs), [Worker(f"worker {number + 1}", self.verbose) for number in range(self.workers)]
        try:
            while waiting or any(worker.job for worker in pool):
                yield from self._assign(waiting, pool)
                yield from _receive(pool)
        finally:
            for worker in pool:
                worker.terminate()
            for worker in pool:
                worker.stop()

    def _assign(self, waiting: list[BuildJob], pool: Sequence[Worker]) -> Iterator[BuildProgress]:
        """Give each idle worker the first of the waiting jobs that fits into memory and cores."""
        for worker in pool:
            job = None if worker.job else next((job for job in waiting if self._fits(job, worker, pool)), None)
            if job is not None:
                waiting.remove(job)
                worker.build(job)
                yield BuildProgress(job.name, worker.name, LOADING)

    def _fits(self, job: BuildJob, worker: Worker, pool: Sequence[Worker]) -> bool:
        claim = ResourceClaim(job.cores, max(job.memory, worker.resident()))
        others = [other.claim() for other in pool if other is not worker]
        return fits(claim, others, ResourceClaim(self.cores, self.memory))


@dataclass(frozen=True)
class ResourceClaim:
    """Cores and bytes of memory that a worker reserves; an idle one reserves no core."""

    cores: int
    memory: int


def fits(claim: ResourceClaim, others: Sequence[ResourceClaim], available: ResourceClaim) -> bool:
    """Return True if a build fits beside `others`; one that needs more than `available` fits if no other one runs."""
    if not any(other.cores for other in others):
        return True
    cores = claim.cores + sum(other.cores for other in others)
    return cores <= available.cores and claim.memory + sum(other.memory for other in others) <= available.memory


def _receive(pool: Sequence[Worker]) -> Iterator[BuildProgress | BuildOutcome]:
    """Wait until workers report something, and yield it."""
    busy = [worker for worker in pool if worker.job]
    ready = wait([worker.connection for worker in busy])
    yield from (worker.receive() for worker in busy if worker.connection in ready)


class Worker:
    """One process, started when it gets its first build."""

    def __init__(self, name: str, verbose: bool) -> None:
        self.name, self.verbose = name, verbose
        self.process: subprocess.Popen[bytes] | None = None
        self.job: BuildJob | None = None

    def build(self, job: BuildJob) -> None:
        """Start the build of `job`."""
        if self.process is None or self.process.poll() is not None or self.resident() > MAX_IDLE_BYTES:
            self.stop()
            self._start()
        self.job, self.stage, self.started = job, LOADING, time.perf_counter()
        with suppress(OSError):  # the worker has just died: `receive` reports it
            self.connection.send(job)

    def receive(self) -> BuildProgress | BuildOutcome:
        """Return what the worker reports, or that it died."""
        assert self.job is not None
        try:
            report: BuildProgress | BuildOutcome = self.connection.recv()
        except (EOFError, OSError):
            report = self._died(self.job)
        if isinstance(report, BuildOutcome):
            self.job = None
        else:
            self.stage = report.stage
        return report

    def resident(self) -> int:
        """Return the resident bytes of its process; 0 if there is none."""
        if self.process is None:
            return 0
        try:
            return int(psutil.Process(self.process.pid).memory_info().rss)
        except psutil.Error:  # it has ended
            return 0

    def claim(self) -> ResourceClaim:
        """Return the resources that the worker takes."""
        cores, memory = (self.job.cores, self.job.memory) if self.job else (0, 0)
        return ResourceClaim(cores, max(memory, self.resident()))

    def terminate(self) -> None:
        """Tell the process to clean up and end."""
        if self.process is not None:
            self.connection.close()
            self.process.terminate()

    def stop(self) -> None:
        """Wait for the process to end, and remove its folder."""
        if self.process is None:
            return
        self.terminate()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.process = self.job = None

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        self.folder = Path(tempfile.mkdtemp(prefix="build-repo-worker-"))
        with (self.folder / ERROR_LOG).open("wb") as errors:
            arguments = [str(PACKAGE.parent), str(self.folder), str(theirs.fileno()), self.name]
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", PROGRAM, *arguments],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "TMPDIR": str(self.folder)},
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr if self.verbose else errors,
                stderr=sys.stderr if self.verbose else errors,
            )
        theirs.close()

    def _died(self, job: BuildJob) -> BuildOutcome:
        assert self.process is not None
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        why = "; the machine may be out of memory: fewer --workers or less --memory-gb" * (code == -signal.SIGKILL)
        last = (self.folder / ERROR_LOG).read_text(errors="replace").strip().splitlines()[-1:]
        error = f"its process {how} in the stage {self.stage!r}{why}" + "".join(f" ({line[:300]})" for line in last)
        self.stop()
        return BuildOutcome(job.name, self.name, time.perf_counter() - self.started, error=error)


def run_worker() -> None:
    """Build the jobs of a connection, one by one, until the process at its other end has no more, or has ended.

    The last three arguments of this process: its folder for temporary files, the connection's number, its own name.
    """
    folder, connection, name = sys.argv[-3], Connection(int(sys.argv[-2])), sys.argv[-1]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal: the parent decides what stops
    jobs: SimpleQueue[BuildJob] = SimpleQueue()
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # through SystemExit, so that the build cleans up
        threading.Thread(target=_receive_jobs, args=(connection, jobs), daemon=True).start()
        while True:
            connection.send(run_job(jobs.get(), name, connection.send))
    except SystemExit:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)  # because torch takes seconds to shut down


def _receive_jobs(connection: Connection, jobs: SimpleQueue[BuildJob]) -> None:
    try:
        while True:
            jobs.put(connection.recv())
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)
