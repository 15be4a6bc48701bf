"""A shared front as a deployed model: one process that answers for encoders which have no front of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from builder.clusters.deploy.deployment import DeployedModel, digest_of_model
from builder.common.errors import RepositoryError, SpecError
from builder.repository.report.record import read_report
from builder.repository.sharing.hosting import MODELS, NAMES_THE_MODEL, config_of, hosted_repositories, read_hosted
from builder.runtime.contract import ContractError, load_shared
from builder.runtime.hosted import HostedModel
from builder.serving.plan.built import plan_built
from builder.serving.plan.lines import ModelPlan, PlanLine, megabytes
from builder.serving.plan.needs import served_version


def shared_fronts(folder: Path) -> Iterator[DeployedModel]:
    """Yield the shared fronts of a repository that host models. Raises RepositoryError and SpecError."""
    for repository in hosted_repositories(folder):
        try:
            hosted = dict(read_hosted(repository))
        except ContractError as error:
            raise RepositoryError(str(error)) from error
        if hosted:
            yield _shared_front(folder, repository.parent.name, hosted)


def _shared_front(folder: Path, name: str, hosted: Mapping[str, HostedModel]) -> DeployedModel:
    reports = [read_report(folder / name / MODELS, model) for model in hosted]
    releases = sorted({report.triton for report in reports})
    if len(releases) > 1:
        raise SpecError(f"{name} hosts models for Triton {' and '.join(releases)}: build them again for one of them")
    version = served_version(folder / name)
    configs = [config_of(folder / name), *(config_of(folder / name / MODELS / model) for model in sorted(hosted))]
    return DeployedModel(
        name=name,
        version=int(version.name),
        entries=(name,),
        release=releases[0],
        target=reports[0].target,
        generates=False,
        request=_request(*next(iter(hosted.items()))),
        plan=_plan(folder / name / MODELS, name, load_shared(version).memory_mb << 20, hosted),
        digest=digest_of_model(reports, configs),
    )


def _plan(repository: Path, name: str, memory: int, hosted: Mapping[str, HostedModel]) -> ModelPlan:
    """Return a plan with the memory that the front was given, and the largest shared-memory region of its models."""
    shm = max(plan_built(repository, model).shm for model in hosted)
    return ModelPlan(name, (PlanLine("memory", "--memory-mb of build-repo share", megabytes(memory)),), {}, memory, shm)


def _request(name: str, model: HostedModel) -> str:
    """Return a request of one of its models as JSON, with a short text in each required input."""
    texts = {tensor: "a" for tensor, optional in model.inputs.items() if not optional}
    return json.dumps({NAMES_THE_MODEL: name, **texts})
