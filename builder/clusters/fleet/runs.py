"""Run the builds of a plan on an executor, and record the outcome of each for later estimates."""

from __future__ import annotations

from contextlib import closing

from builder.clusters.fleet.executor import BuildJob, BuildOutcome, Executor
from builder.clusters.fleet.history import History, work_of
from builder.clusters.fleet.view import View


def run_jobs(jobs: list[BuildJob], executor: Executor, history: History, view: View) -> list[BuildOutcome]:
    """Build all jobs and return their outcomes in the same order; all workers are stopped, also after an error.

    Raises BuilderError if the executor has no worker at all.
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
