"""Plan of the builds of many models: what is new, what changed, how long it takes and how much memory."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Literal

from builder.building.keys import build_key, last_cached_stage
from builder.clusters.fleet.executor import BuildJob
from builder.clusters.fleet.history import BuildEstimate, History, work_of
from builder.clusters.fleet.work import newest_report
from builder.common.errors import CheckpointError, RepositoryError, SpecError
from builder.options import BuildSpec
from builder.repository.report.record import BuildReport

Status = Literal["new", "changed", "unchanged", "refused"]
NO_WORK = BuildEstimate(0.0, 0)


@dataclass(frozen=True)
class PlannedBuild:
    """One model of the plan.

    `reason`: for its status, in words; `report`: of the version that is published already; `cached_stage`: the
    last stage that the cache has, so that a build begins after it.
    """

    spec: BuildSpec
    status: Status
    expected: BuildEstimate = NO_WORK
    reason: str = ""
    report: BuildReport | None = None
    cached_stage: str | None = None

    @property
    def name(self) -> str:
        return self.spec.entry_name

    @property
    def is_built(self) -> bool:
        """True if the model is to be built."""
        return self.status in ("new", "changed")


@dataclass(frozen=True)
class FleetPlan:
    """All models, in the order of the models.yaml."""

    models: tuple[PlannedBuild, ...]

    @cached_property
    def counts(self) -> Counter[str]:
        """Number of models of each status."""
        return Counter(model.status for model in self.models)

    @cached_property
    def builds(self) -> list[PlannedBuild]:
        """Models to build, in the order in which their builds begin.

        The first model of each checkpoint comes before all second ones, which then reuse its export. Long builds begin
        early, so that none runs alone at the end. Builds that choose by measured times come last, because each of them
        runs alone.
        """
        turns: defaultdict[str, Iterator[int]] = defaultdict(count)
        built = [(next(turns[m.spec.model]), m) for m in self.models if m.is_built]
        ordered = sorted(built, key=lambda one: (one[1].spec.chooses_by_time, one[0], -self.seconds_of(one[1])))
        return [model for _, model in ordered]

    @cached_property
    def _typical(self) -> float:
        known = [m.expected.seconds for m in self.models if m.is_built and m.expected.seconds is not None]
        return statistics.median(known) if known else 0.0

    def seconds_of(self, model: PlannedBuild) -> float:
        """Return the expected seconds of a build; if unknown, the median of the others, or 0 if none is known."""
        return self._typical if model.expected.seconds is None else model.expected.seconds

    def seconds(self, workers: int) -> float:
        """Return roughly the seconds of all builds on `workers` workers; 0 if nothing is known."""
        shared = [self.seconds_of(m) for m in self.builds if not m.spec.chooses_by_time]
        alone = sum(self.seconds_of(m) for m in self.builds if m.spec.chooses_by_time)
        return alone + max([sum(shared) / workers, *shared])

    def jobs(self, cores: int, workers: int) -> list[BuildJob]:
        """Return the jobs for an executor of `workers` that share `cores`; one that chooses by times gets all cores."""
        share = max(1, cores // workers)
        return [
            BuildJob(
                m.spec,
                m.expected.memory,
                cores if m.spec.chooses_by_time else share,
                0 if m.report is None else m.report.version,
            )
            for m in self.builds
        ]


def plan_builds(specs: Sequence[BuildSpec], history: History, rebuild: bool = False) -> FleetPlan:
    """Plan a build for each spec from its checkpoint and its published version. `rebuild`: build unchanged ones too."""
    return FleetPlan(tuple(_planned(spec, history, rebuild) for spec in specs))


def _planned(spec: BuildSpec, history: History, rebuild: bool) -> PlannedBuild:
    try:
        planned = _published(spec, rebuild)
        if not planned.is_built:
            return planned
        cached = last_cached_stage(spec)
    except (CheckpointError, SpecError) as error:
        return PlannedBuild(spec, "refused", reason=str(error))
    return replace(planned, cached_stage=cached, expected=history.estimate(work_of(spec), cached))


def _published(spec: BuildSpec, rebuild: bool) -> PlannedBuild:
    """Compare a model with its published version. Raises CheckpointError and SpecError."""
    key = build_key(spec)
    try:
        report = newest_report(spec)
    except RepositoryError as error:
        return PlannedBuild(spec, "changed", reason=str(error))
    if report is None:
        return PlannedBuild(spec, "new")
    if rebuild or report.build_key != key:
        return PlannedBuild(spec, "changed", reason="--rebuild" if rebuild else "", report=report)
    return PlannedBuild(spec, "unchanged", reason=f"version {report.version}", report=report)
