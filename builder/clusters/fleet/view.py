"""View of a run: the plan, a line per worker while it runs, the end of each build, and a summary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from builder.clusters.fleet.executor import BuildOutcome, BuildProgress
from builder.clusters.fleet.plan import FleetPlan
from builder.common.progress import duration

MAX_ROWS = 40  # models of a plan that are listed
REFRESHES_PER_S = 4


class LineView(AbstractContextManager["LineView"]):
    """View with one line per finished build."""

    def __init__(self, console: Console, builds: int) -> None:
        self.console, self.builds, self.ended = console, builds, 0

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, event: BuildProgress | BuildOutcome) -> None:
        if isinstance(event, BuildOutcome):
            self.ended += 1
            line = f"[{self.ended}/{self.builds}] {_outcome_line(event)}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """View with one line per finished build; below them a line per worker with its build, and a bar of all builds."""

    def __init__(self, console: Console, plan: FleetPlan, workers: int) -> None:
        self.console, self.workers = console, workers
        self.busy: dict[str, tuple[BuildProgress, float]] = {}
        self.remaining = {model.name: plan.seconds_of(model) or 1.0 for model in plan.builds}
        self.ended = 0
        self.warm: tuple[float, float] | None = None  # time and remaining work when the first builds had ended
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self.progress = Progress(*columns, console=console)
        self.task = self.progress.add_task("", total=len(plan.builds))
        self.live = Live(
            console=console, get_renderable=self._render, refresh_per_second=REFRESHES_PER_S, transient=True
        )

    def __enter__(self) -> LiveView:
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def show(self, event: BuildProgress | BuildOutcome) -> None:
        if isinstance(event, BuildProgress):
            self.busy[event.worker] = event, time.monotonic()
            return
        self.busy.pop(event.worker, None)
        self.remaining.pop(event.name, None)
        self.ended += 1
        if self.ended == self.workers:
            self.warm = time.monotonic(), sum(self.remaining.values())
        self.progress.advance(self.task)
        self.console.print(_outcome_line(event), markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        seconds = self._remaining_seconds()
        self.progress.update(self.task, description="" if seconds is None else f"{duration(seconds)} left")
        table = Table.grid(padding=(0, 2))
        for worker, (stage, since) in sorted(self.busy.items()):
            # no markup: a line that is printed without markup renders this table without it too
            name = Text(stage.name, style="bold")
            table.add_row(worker, name, Text(stage.stage), f"{time.monotonic() - since:.0f} s")
        return Group(table, self.progress)

    def _remaining_seconds(self) -> float | None:
        """Scale the estimates of the remaining builds by how long the finished ones took; None if that is unknown.

        The first builds of the workers do not count, because they load PyTorch, and as many further ones must have
        ended.
        """
        if self.warm is None or not self.remaining or self.ended < 2 * self.workers:
            return None
        since, total = self.warm
        remaining = sum(self.remaining.values())
        return (time.monotonic() - since) * remaining / (total - remaining)


def _outcome_line(outcome: BuildOutcome) -> str:
    if outcome.report is None:
        return f"✗ {outcome.name}: {outcome.error}"
    if not outcome.stages:
        return f"✓ {outcome.name}: version {outcome.report.version}, which was published meanwhile"
    cached = ", with what the cache had" * bool(outcome.report.kept)
    warnings = f", {len(outcome.report.warnings)} warnings" * bool(outcome.report.warnings)
    size = f", {outcome.memory / 1e6:.0f} MB" * bool(outcome.memory)
    return f"✓ {outcome.name}: version {outcome.report.version} in {duration(outcome.seconds)}{size}{cached}{warnings}"


def plan_line(plan: FleetPlan, workers: int, budget: int) -> str:
    """Return the plan as a line."""
    counts = ", ".join(f"{number} {status}" for status, number in plan.counts.items())
    cached = sum(model.cached_stage is not None for model in plan.builds)
    counts += f" ({cached} with stages in the cache)" * bool(cached)
    if not plan.builds:
        return f"{len(plan.models)} models: {counts}"
    seconds = plan.seconds(workers)
    how_long = f"about {duration(seconds)}" if seconds else "no similar build is known yet, so the time is unknown"
    memory = sum(sorted(model.expected.memory for model in plan.builds)[-workers:])
    return (
        f"{len(plan.models)} models: {counts}; {how_long} on {workers} worker{'s' * (workers > 1)}, "
        f"{min(memory, budget) / 1e9:.1f} of {budget / 1e9:.1f} GB"
    )


def plan_table(plan: FleetPlan) -> Table:
    """Return a table of the models that are not unchanged; only the first ones are listed."""
    listed = [model for model in plan.models if model.status != "unchanged"]
    table = Table(title_justify="left", caption_justify="left")
    for title in ("model", "", "kept in the cache", "seconds", "MB"):
        table.add_column(title, justify="right" if title in ("seconds", "MB") else "left")
    for model in listed[:MAX_ROWS]:
        status = f"{model.status}: {model.reason}" if model.reason else model.status
        cached = f"up to {model.cached_stage}" if model.cached_stage else ""
        seconds = "?" if model.expected.seconds is None else f"{model.expected.seconds:.1f}"
        table.add_row(model.name, escape(status), cached, seconds, f"{model.expected.memory / 1e6:.0f}")
    table.caption = f"and {len(listed) - MAX_ROWS} more" if len(listed) > MAX_ROWS else None
    return table


def plan_document(plan: FleetPlan, workers: int, budget: int) -> dict[str, Any]:
    """Return the plan as JSON: bytes and seconds."""
    models = [
        {
            "name": m.name,
            "model": m.spec.model,
            "status": m.status,
            "why": m.reason,
            "kept": m.cached_stage,
            **asdict(m.expected),
        }
        for m in plan.models
    ]
    return {"models": models, "workers": workers, "memory": budget, "seconds": plan.seconds(workers) if models else 0}


def summary(plan: FleetPlan, outcomes: Sequence[BuildOutcome], seconds: float) -> list[str]:
    """Return the lines at the end of a run: the failed builds with their errors, then the totals."""
    failed = [(model.name, model.reason) for model in plan.models if model.status == "refused"]
    failed += [(outcome.name, str(outcome.error)) for outcome in outcomes if outcome.report is None]
    built = len(outcomes) - sum(outcome.report is None for outcome in outcomes)
    largest = max((outcome.memory for outcome in outcomes), default=0)
    numbers = [f"{built} built", f"{plan.counts['unchanged']} unchanged", f"{len(failed)} failed"]
    line = f"{', '.join(numbers)} in {duration(seconds)}"
    line += f"; the largest build took {largest / 1e6:.0f} MB" * bool(largest)
    return [*(f"✗ {name}: {reason}" for name, reason in failed), line]
