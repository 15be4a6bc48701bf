"""Build of one model in this process, as `build-repo MODEL` runs it, and what it prints."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator

from builder.clusters.fleet.executor import BuildOutcome
from builder.clusters.fleet.history import History, work_of
from builder.clusters.fleet.plan import PlannedBuild
from builder.clusters.fleet.work import collecting_garbage_rarely, load_libraries, peak_memory, reset_peak_memory
from builder.commands import screen, screen_table
from builder.commands.downloads import loading
from builder.common.progress import duration
from builder.common.releases import NEWEST, missing_fixes
from builder.repository.check import pending
from builder.repository.report.record import BuildReport


def build_one(model: PlannedBuild, history: History, verbose: bool, show: bool) -> BuildReport:
    """Build in this process, stage by stage; do nothing if nothing changed. Raises BuilderError.

    `history`: where the time that it took is recorded, for the estimate of the next. `verbose`: print the output of
    libraries; `show`: print the table of variants.
    """
    spec = model.spec
    screen.print(f"[bold]{spec.entry_name}[/] from {spec.model}", soft_wrap=True)
    if model.status == "unchanged" and model.report is not None:
        report, outcome = model.report, f"nothing to do: version {model.report.version} of {spec.entry_name}"
        done = f"{outcome} is what this would build, and is in {spec.store or spec.output} (--rebuild builds it again)"
    else:
        report = _built(model, history, verbose)
        outcome = f"version {report.version} of {' and '.join(report.files)}"
        done = f"published {outcome} in {spec.store or spec.output}"
    if show:
        screen_table(report.table())
    screen.print(f"  {done}", soft_wrap=True)
    for name, what in pending(spec.output, unserved=True).items():
        if spec.store is None and name in report.files:
            screen.print(f"  [yellow]next:[/] {what}", soft_wrap=True)
    return report


def _built(model: PlannedBuild, history: History, verbose: bool) -> BuildReport:
    spec = model.spec
    with screen.status("loading torch and transformers"):
        load_libraries()
    from builder.building.pipeline import build
    from builder.checkpoints.libraries import quiet_libraries

    warn_of_release(spec.triton, indent="  ")
    quiet = contextlib.nullcontext() if verbose else quiet_libraries()
    reset_peak_memory()
    stages = Stages(model.expected.seconds)
    with collecting_garbage_rarely(), _library_output(verbose), quiet:
        report = build(spec, stages.show)
    history.record(work_of(spec), BuildOutcome(spec.entry_name, "", stages.elapsed(), peak_memory(), report))
    for warning in report.warnings:
        screen.print(f"  [yellow]warning:[/] {warning}")
    if report.choice:
        screen.print(f"  {report.choice}")
    if report.memory:
        parts = ", ".join(f"{size / 1e6:.0f} MB of {what}" for what, size in report.memory.items())
        screen.print(f"  {parts}")
    if fused := fused_operators(report):
        screen.print(f"  {fused}", soft_wrap=True)
    return report


def fused_operators(report: BuildReport) -> str:
    """Return in how many layers attention is fused, and the fused operators; empty for a graph without either."""
    fused = ", ".join(f"{count} {name}" for name, count in report.operators.items())
    layers = report.attention["layers"]
    if not layers:
        return fused and f"fused operators: {fused}"
    return f"attention fused in {report.attention['fused']} of {layers} layers; {fused}"


def warn_of_release(triton: str, indent: str = "") -> None:
    """Print a warning for a release that is not for untrusted clients."""
    if too_old := older_than_fixes(triton):
        screen.print(f"{indent}[yellow]warning:[/] {too_old}", soft_wrap=True)


def older_than_fixes(triton: str) -> str:
    """Return why a release is not for untrusted clients, in one line; empty if no problem is known."""
    fixes = missing_fixes(triton)
    if not fixes:
        return ""
    reasons = "; ".join(f"{fix.what} (mended in {fix.since}: {fix.source})" for fix in fixes)
    return f"Triton {triton} is older than known fixes: {reasons}. Build for {NEWEST} if you can (--triton)"


class Stages:
    """Stages of a build on the screen. `expected`: seconds of all, if known from similar builds."""

    def __init__(self, expected: float | None) -> None:
        self.expected, self.start = expected, time.perf_counter()

    def elapsed(self) -> float:
        """Return the seconds since the build began."""
        return time.perf_counter() - self.start

    @contextlib.contextmanager
    def show(self, name: str) -> Iterator[None]:
        """Print one line per stage: while it runs a spinner and what is left of the build, its time when it is done."""
        start = time.perf_counter()
        with loading(lambda: self.title(name)):
            yield
        screen.print(f"  [green]✓[/] {name:<16} {time.perf_counter() - start:6.1f} s")

    def title(self, name: str) -> str:
        """Return the name of a stage, with the time that is left of the build."""
        left = (self.expected or 0.0) - self.elapsed()
        return f"{name}, about {duration(left)} of the build left" if left > 0 else name


@contextlib.contextmanager
def _library_output(shown: bool) -> Iterator[None]:
    """Send the output of libraries, from Python or C++, to standard error or nowhere, never to standard output."""
    sys.stdout.flush()
    duplicate = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(2 if shown else nowhere.fileno(), 1)
            yield
    finally:
        sys.stdout.flush()
        os.dup2(duplicate, 1)
        os.close(duplicate)
