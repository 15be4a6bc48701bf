"""One build on a worker of any executor: its progress, its resources and its outcome."""

from __future__ import annotations

import gc
import importlib
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from builder.building.keys import build_key
from builder.clusters.fleet.executor import BuildJob, BuildOutcome, BuildProgress
from builder.common.cache.folder import LOCKS, cache_home
from builder.common.errors import BuilderError, RepositoryError
from builder.common.files import lock_file
from builder.common.hashing import digest_of
from builder.common.machine import sharing_cores
from builder.options import BuildSpec
from builder.repository.report.record import REPORT, BuildReport, parse_report, read_report
from builder.repository.stores.opening import open_versions
from builder.repository.versions import version_numbers

OnProgress = Callable[[BuildProgress], None]

WAITING = "waiting for another run, which builds the same"  # a stage before the first
GC_THRESHOLDS = (50_000, 20, 20)  # of gc.set_threshold
GOMP_SPINCOUNT = "10000"  # about a tenth of a millisecond; the default is 300,000
PIPELINE = "builder.building.pipeline"  # its import loads all that a build runs
RESET_PEAK = "5"  # man proc_pid_clear_refs(5): the peak becomes what is resident now


def run_job(job: BuildJob, worker: str, on_progress: OnProgress = lambda progress: None) -> BuildOutcome:
    """Build `job` in this process, on its share of the cores; errors are part of the outcome.

    Waits while another process of this machine builds the same. Loads torch, unless another run has published the same
    since `job` was planned.
    """
    with _locked_build(job, lambda: on_progress(BuildProgress(job.name, worker, WAITING))):
        published = find_published(job)
        if published is not None:
            return BuildOutcome(job.name, worker, 0, report=published)
        load_libraries()
        with collecting_garbage_rarely():
            return _run_build(job, worker, on_progress)


@contextmanager
def _locked_build(job: BuildJob, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of builds with the key of `job`; hold none if the key or the lock is not available."""
    with ExitStack() as stack:
        with suppress(BuilderError, OSError):  # the build itself reports a checkpoint that cannot be read
            folder = cache_home() / LOCKS
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_file(folder / build_key(job.spec), on_wait))
        yield


def find_published(job: BuildJob) -> BuildReport | None:
    """Return the report of the same build if another run has published it since `job` was planned."""
    try:
        report = newest_report(job.spec)
        is_done = report is not None and report.version > job.before and report.build_key == build_key(job.spec)
    except (BuilderError, OSError):  # damaged, or a missing checkpoint or disk: the build repairs or reports it
        return None
    return report if is_done else None


def newest_report(spec: BuildSpec) -> BuildReport | None:
    """Return the report of the newest version, whose files must be as they were built; None if there is none.

    The newest counts, whichever is served: building the same again does not undo a rollback. Raises RepositoryError.
    """
    if spec.store is None:
        return _newest_in_folder(spec.output, spec.entry_name)
    store, name = open_versions(spec.store), spec.entry_name
    versions = store.versions(name)
    if not versions:
        return None
    manifest, path = store.manifest(name, versions[-1]), f"{name}/{versions[-1]}/{REPORT}"
    if path not in manifest.files:
        raise RepositoryError(f"{spec.store} has no {path}")
    return parse_report(store.read(manifest.files[path]), f"{spec.store}/{path}")


def _newest_in_folder(output: Path, name: str) -> BuildReport | None:
    folder = output / name
    versions = version_numbers(folder)
    if not versions:
        return None
    report = read_report(folder, str(versions[-1]))
    for entry, files in report.files.items():
        for path, digest in files.items():
            file = output / entry / path
            if not file.is_file():
                raise RepositoryError(f"{file} is missing")
            # Those beside the version folders are of the served version, which may be another one.
            if path.startswith(f"{versions[-1]}/") and digest_of([file]) != digest:
                raise RepositoryError(f"{file} is not the file that was built")
    return report


def _run_build(job: BuildJob, worker: str, on_progress: OnProgress) -> BuildOutcome:
    import torch

    from builder.building.pipeline import build
    from builder.checkpoints.libraries import quiet_libraries

    stages: dict[str, float] = {}
    started = time.perf_counter()
    report, error, details = None, None, ""
    reset_peak_memory()
    torch.set_num_threads(job.cores)
    with sharing_cores(job.cores), quiet_libraries():
        try:
            report = build(job.spec, lambda name: _stage(name, job, worker, on_progress, stages))
        except BuilderError as refusal:
            error = str(refusal)
        except Exception as defect:  # of one model; the others are still built
            error, details = _in_a_line(defect), traceback.format_exc()
    took = time.perf_counter() - started
    return BuildOutcome(job.name, worker, took, peak_memory(), report, error, stages, details)


def peak_memory() -> int:
    """Return the peak resident bytes of this process since `reset_peak_memory`; 0 if there is no /proc."""
    with suppress(OSError):
        peak = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        return int(peak[1]) * 1024 if peak else 0
    return 0


def reset_peak_memory() -> None:
    """Restart `peak_memory` from now; if the system does not allow that, it counts from the start of the process."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text(RESET_PEAK)


def load_libraries() -> None:
    """Import what a build runs, in a process that only builds.

    The garbage collector is off meanwhile and later skips the imported objects: modules are millions of objects,
    which stay.
    """
    limit_spinning()
    if PIPELINE in sys.modules:
        return
    collecting = gc.isenabled()
    gc.disable()
    try:
        from builder.checkpoints.libraries import load_losses, load_models

        load_models()
        load_losses()
        importlib.import_module(PIPELINE)
    finally:
        gc.freeze()
        if collecting:
            gc.enable()


def limit_spinning() -> None:
    """Make threads of torch sleep soon when they wait for each other, unless the user sets the time.

    Call it before torch is loaded. By GNU OpenMP's default they spin for milliseconds. If other programs have the
    cores, that keeps away the very thread that is waited for: a forward pass of GPT-2 took 2.5 times as long.

    Source: libgomp's manual, "GOMP_SPINCOUNT".
    """
    os.environ.setdefault("GOMP_SPINCOUNT", GOMP_SPINCOUNT)


@contextmanager
def collecting_garbage_rarely() -> Iterator[None]:
    """Run the block with rare garbage collections.

    Libraries and exports create millions of objects, nearly all of which stay. A stage of a large model collects by
    itself (builder/checkpoints/mapped.py).
    """
    before = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def _stage(name: str, job: BuildJob, worker: str, on_progress: OnProgress, stages: dict[str, float]) -> Iterator[None]:
    on_progress(BuildProgress(job.name, worker, name))
    started = time.perf_counter()
    try:
        yield
    finally:
        stages[name] = stages.get(name, 0.0) + time.perf_counter() - started


def _in_a_line(defect: Exception) -> str:
    frame = traceback.extract_tb(defect.__traceback__)[-1]
    first = (str(defect).strip().splitlines() or [""])[0][:300]
    where = f"{Path(frame.filename).name}, line {frame.lineno}"
    return f"{type(defect).__name__}: {first} ({where}), a defect of build-repo; --verbose shows all of it"
