"""Build several models on workers, as `build-repo models.yaml` does, and print their progress and outcomes."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from builder.clusters.fleet.executor import BuildJob, BuildOutcome, Executor
from builder.clusters.fleet.history import History, work_of
from builder.clusters.fleet.plan import FleetPlan
from builder.clusters.fleet.processes import ProcessExecutor
from builder.clusters.fleet.view import LineView, LiveView, plan_document, plan_line, plan_table, summary
from builder.commands import screen, screen_table
from builder.commands.build_one import warn_of_release
from builder.common.machine import available_cores, available_memory
from builder.options.build_spec import HEADROOM

RAY = "ray"


def parse_workers(text: str) -> int | str:
    """Parse a value of --workers: a number of processes, or RAY. Raises ArgumentTypeError."""
    if text == RAY:
        return RAY
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of processes, from 1 on, nor {RAY}")
    return int(text)


def build_many(plan: FleetPlan, options: argparse.Namespace) -> int:
    """Build on workers; a model that fails is reported at the end and stops no other."""
    budget = round(options.memory_gb * 1e9 if options.memory_gb else HEADROOM * available_memory())
    # On Ray the cluster decides; the plan then is for a machine like this one.
    processes = options.workers if isinstance(options.workers, int) else available_cores()
    workers = max(1, min(processes, len(plan.builds)))
    screen.print(plan_line(plan, workers, budget), soft_wrap=True)
    if options.dry_run:
        if options.json:
            print(json.dumps(plan_document(plan, workers, budget), indent=1))
        elif len(plan.models) > plan.counts["unchanged"]:
            screen_table(plan_table(plan))
        return 1 if plan.counts["refused"] else 0
    for triton in sorted({model.spec.triton for model in plan.builds}):
        warn_of_release(triton)
    start = time.perf_counter()
    jobs = plan.jobs(available_cores(), workers)
    outcomes: list[BuildOutcome] = []
    if jobs:
        executor = _executor(options, workers, budget)
        view = LiveView(screen, plan, workers) if screen.is_terminal else LineView(screen, len(plan.builds))
        outcomes = run_jobs(jobs, executor, History(), view)
    for line in summary(plan, outcomes, time.perf_counter() - start):
        screen.print(line, markup=False, soft_wrap=True)
    for outcome in outcomes:
        if outcome.details and options.verbose:
            screen.print(outcome.details, markup=False)
    if options.json:
        print(json.dumps(_documents(plan, outcomes), indent=1))
    return 1 if plan.counts["refused"] or any(outcome.report is None for outcome in outcomes) else 0


def _executor(options: argparse.Namespace, workers: int, memory: int) -> Executor:
    if options.workers != RAY:
        return ProcessExecutor(workers, memory, verbose=options.verbose)
    from builder.clusters.fleet.ray import RayExecutor
    from builder.clusters.ray.cluster import cluster_address

    return RayExecutor(cluster_address())


def run_jobs(
    jobs: Sequence[BuildJob], executor: Executor, history: History, view: LineView | LiveView
) -> list[BuildOutcome]:
    """Build all jobs, record each outcome for later estimates, and return the outcomes as they came.

    All workers are stopped, also after an error. Raises BuilderError if the executor has no worker at all.
    """
    specs, outcomes = {job.name: job.spec for job in jobs}, []
    with view, closing(executor.run(jobs)) as events:
        for event in events:
            view.show(event)
            if isinstance(event, BuildOutcome):
                outcomes.append(event)
                if event.report is not None and event.stages:
                    history.record(work_of(specs[event.name]), event)
    return outcomes


def _documents(plan: FleetPlan, outcomes: Sequence[BuildOutcome]) -> Any:
    """Return the reports of all models that are published, built now or before; for one model, that report alone."""
    built = {outcome.name: outcome.report for outcome in outcomes}
    reports = [built.get(model.name) if model.is_built else model.report for model in plan.models]
    documents = [report.document() for report in reports if report is not None]
    return documents[0] if len(plan.models) == len(documents) == 1 else documents
