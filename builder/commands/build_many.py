"""Builds of several models on workers, as `build-repo models.yaml` runs them, and what they print."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import Any

from builder.clusters.fleet import executors
from builder.clusters.fleet.executor import BuildOutcome
from builder.clusters.fleet.history import History
from builder.clusters.fleet.plan import FleetPlan
from builder.clusters.fleet.runs import run_jobs
from builder.clusters.fleet.view import plan_document, plan_line, plan_table, summary, view
from builder.commands import screen, screen_table
from builder.commands.build_one import warn_of_release
from builder.common.machine import available_cores, available_memory
from builder.options.build_spec import HEADROOM


def build_many(plan: FleetPlan, options: argparse.Namespace) -> int:
    """Build on workers; a model that fails is reported at the end and stops no other."""
    budget = round(options.memory_gb * 1e9 if options.memory_gb else HEADROOM * available_memory())
    workers = executors.concurrent_builds(options.workers, len(plan.builds))
    screen.print(plan_line(plan, workers, budget), highlight=False, soft_wrap=True)
    if options.dry_run:
        if options.json:
            print(json.dumps(plan_document(plan, workers, budget), indent=1))
        elif len(plan.models) > plan.counts["unchanged"]:
            screen_table(plan_table(plan))
        return 1 if plan.counts["refused"] else 0
    for triton in sorted({model.spec.triton for model in plan.builds}):
        warn_of_release(triton)
    start = time.perf_counter()
    executor = executors.make_executor(options.workers, workers, budget, options.verbose)
    jobs = plan.jobs(available_cores(), workers)
    outcomes = run_jobs(jobs, executor, History(), view(screen, plan, workers)) if jobs else []
    for line in summary(plan, outcomes, time.perf_counter() - start):
        screen.print(line, markup=False, highlight=False, soft_wrap=True)
    for outcome in outcomes:
        if outcome.details and options.verbose:
            screen.print(outcome.details, markup=False, highlight=False)
    if options.json:
        print(json.dumps(_documents(plan, outcomes), indent=1))
    return 1 if plan.counts["refused"] or any(outcome.report is None for outcome in outcomes) else 0


def _documents(plan: FleetPlan, outcomes: Sequence[BuildOutcome]) -> Any:
    """Return the reports of all models that are published, built now or before; for one model, that report alone."""
    built = {outcome.name: outcome.report for outcome in outcomes}
    reports = [built.get(model.name) if model.is_built else model.report for model in plan.models]
    documents = [report.document() for report in reports if report is not None]
    return documents[0] if len(plan.models) == len(documents) == 1 else documents
