"""View of a run: the plan, a line per worker while it lasts, how each build ended, and a summary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from builder.clusters.fleet.executor import Outcome
from builder.clusters.fleet.executor import Progress as Stage
from builder.clusters.fleet.plan import Plan, Planned

ROWS = 40  # models of a plan that are listed
REFRESHES = 4  # a second


class View(AbstractContextManager["View"], Protocol):
    """View that is told what happens."""

    def say(self, news: Stage | Outcome) -> None: ...


def view(console: Console, plan: Plan, workers: int) -> View:
    """Return a live view on a terminal, else one that prints a line per build."""
    return Screen(console, plan, workers) if console.is_terminal else Lines(console, len(plan.builds))


class Lines(View):
    """View with one line per finished build."""

    def __init__(self, console: Console, builds: int) -> None:
        self.console, self.builds, self.ended = console, builds, 0

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, news: Stage | Outcome) -> None:
        if isinstance(news, Outcome):
            self.ended += 1
            line = f"[{self.ended}/{self.builds}] {_end_of(news)}"
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)


class Screen(View):
    """View with one line per finished build; below them a line per worker with its build, and a bar of all builds."""

    def __init__(self, console: Console, plan: Plan, workers: int) -> None:
        self.console, self.plan, self.workers = console, plan, workers
        self.busy: dict[str, tuple[Stage, float]] = {}
        self.left = {model.name: plan.seconds_of(model) or 1.0 for model in plan.builds}
        self.all, self.begun = sum(self.left.values()), time.monotonic()
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        self.progress = Progress(*columns, console=console)
        self.task = self.progress.add_task("", total=len(plan.builds))
        self.inside = ExitStack()

    def __enter__(self) -> Screen:
        self.inside.enter_context(
            Live(console=self.console, get_renderable=self._render, refresh_per_second=REFRESHES, transient=True)
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.inside.close()

    def say(self, news: Stage | Outcome) -> None:
        if isinstance(news, Stage):
            self.busy[news.worker] = news, time.monotonic()
            return
        self.busy.pop(news.worker, None)
        self.left.pop(news.name, None)
        self.progress.advance(self.task)
        self.console.print(_end_of(news), markup=False, highlight=False, soft_wrap=True)

    def _render(self) -> RenderableType:
        self.progress.update(self.task, description=f"{duration(self._seconds_left())} left" if self.left else "")
        table = Table.grid(padding=(0, 2))
        for worker, (stage, since) in sorted(self.busy.items()):
            table.add_row(worker, f"[bold]{escape(stage.name)}", stage.stage, f"{time.monotonic() - since:.0f} s")
        return Group(table, self.progress)

    def _seconds_left(self) -> float:
        """Estimate by what was expected of the builds, and by how long the finished ones took together."""
        left = sum(self.left.values())
        if left == self.all:
            return self.plan.seconds(self.workers)
        return (time.monotonic() - self.begun) * left / (self.all - left)


def _end_of(outcome: Outcome) -> str:
    if outcome.report is None:
        return f"✗ {outcome.name}: {outcome.error}"
    if not outcome.stages:
        return f"✓ {outcome.name}: version {outcome.report.version}, which was published meanwhile"
    cached = ", with what the cache had" * bool(outcome.report.kept)
    warnings = f", {len(outcome.report.warnings)} warnings" * bool(outcome.report.warnings)
    size = f", {outcome.memory / 1e6:.0f} MB" * bool(outcome.memory)
    return f"✓ {outcome.name}: version {outcome.report.version} in {duration(outcome.seconds)}{size}{cached}{warnings}"


def plan_line(plan: Plan, workers: int, budget: int) -> str:
    """Return the plan as a line."""
    counts = ", ".join(f"{number} {status}" for status, number in plan.counts.items())
    cached = sum(model.cached_stage is not None for model in plan.builds)
    counts += f" ({cached} with stages in the cache)" * bool(cached)
    if not plan.builds:
        return f"{len(plan.models)} models: {counts}"
    seconds = plan.seconds(workers)
    how_long = f"about {duration(seconds)}" if seconds else "no build like these is known, so nobody knows how long"
    memory = sum(sorted(model.expected.memory for model in plan.builds)[-workers:])
    return (
        f"{len(plan.models)} models: {counts}; {how_long} on {workers} worker{'s' * (workers > 1)}, "
        f"{min(memory, budget) / 1e9:.1f} of {budget / 1e9:.1f} GB"
    )


def plan_table(plan: Plan) -> Table:
    """Return a table of the models that are not unchanged; only the first ones are listed."""
    listed = [model for model in plan.models if model.status != "unchanged"]
    table = Table(title_justify="left", caption_justify="left")
    for title in ("model", "", "kept in the cache", "seconds", "MB"):
        table.add_column(title, justify="right" if title in ("seconds", "MB") else "left")
    for model in listed[:ROWS]:
        status = f"{model.status}: {model.why}" if model.why else model.status
        cached = f"up to {model.cached_stage}" if model.cached_stage else ""
        table.add_row(model.name, escape(status), cached, _seconds(model), f"{model.expected.memory / 1e6:.0f}")
    table.caption = f"and {len(listed) - ROWS} more" if len(listed) > ROWS else None
    return table


def plan_document(plan: Plan, workers: int, budget: int) -> dict[str, Any]:
    """Return the plan as JSON: bytes and seconds."""
    models = [
        {
            "name": m.name,
            "model": m.spec.model,
            "status": m.status,
            "why": m.why,
            "kept": m.cached_stage,
            **asdict(m.expected),
        }
        for m in plan.models
    ]
    return {"models": models, "workers": workers, "memory": budget, "seconds": plan.seconds(workers) if models else 0}


def summary(plan: Plan, outcomes: Sequence[Outcome], seconds: float) -> list[str]:
    """Return lines that say how the run ended: what failed and why, then all in numbers."""
    failed = [(model.name, model.why) for model in plan.models if model.status == "refused"]
    failed += [(outcome.name, str(outcome.error)) for outcome in outcomes if outcome.report is None]
    built = len(outcomes) - sum(outcome.report is None for outcome in outcomes)
    largest = max((outcome.memory for outcome in outcomes), default=0)
    numbers = [f"{built} built", f"{plan.counts['unchanged']} unchanged", f"{len(failed)} failed"]
    line = f"{', '.join(numbers)} in {duration(seconds)}"
    line += f"; the largest build took {largest / 1e6:.0f} MB" * bool(largest)
    return [*(f"✗ {name}: {why}" for name, why in failed), line]


def _seconds(model: Planned) -> str:
    return "?" if model.expected.seconds is None else f"{model.expected.seconds:.1f}"


def duration(seconds: float) -> str:
    """Return a duration such as "3.2 s", "4 min 05 s" and "2 h 10 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
