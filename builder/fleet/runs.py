"""A run: the builds of a plan on an executor, with each one's end written down for the next estimate."""

from __future__ import annotations

from contextlib import closing

from builder.fleet.executor import Executor, Job, Outcome
from builder.fleet.history import History, work_of
from builder.fleet.view import View


def run_jobs(jobs: list[Job], executor: Executor, history: History, view: View) -> list[Outcome]:
    """Build them all, and leave no worker behind, whatever ends it. Returns how each ended, in that order.

    Raises BuilderError where the executor has no worker at all.
    """
    specs, outcomes = {job.name: job.spec for job in jobs}, []
    with view, closing(executor.run(jobs)) as events:
        for event in events:
            view.say(event)
            if isinstance(event, Outcome):
                outcomes.append(event)
                if event.report is not None and event.stages:
                    history.remember(work_of(specs[event.name]), event)
    return outcomes
