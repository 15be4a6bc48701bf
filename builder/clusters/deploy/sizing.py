"""Resources of a replica: by the plan of a models.yaml that describes a load, or as the models were built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from builder.clusters.deploy.deployment import DeployedModel, ReplicaSize
from builder.common.errors import SpecError
from builder.repository.config.arguments import RESPONSE_CACHE
from builder.serving.plan.lines import ModelPlan, all_memory, all_shared_memory, gpu_count


def as_built(models: Sequence[DeployedModel], cores: int | None) -> ReplicaSize:
    """Return the size with `cores`, or with those of the most demanding model. Raises SpecError if neither is known."""
    plans = [model.plan for model in models]
    gpus = gpu_count(device for plan in plans for device in plan.gpu_memory)
    return ReplicaSize(cores or _cores(plans), all_memory(plans), all_shared_memory(plans), RESPONSE_CACHE, gpus)


def as_planned(
    models: Sequence[DeployedModel], file: Path, replicas: int, cores: int | None
) -> tuple[tuple[DeployedModel, ...], ReplicaSize]:
    """Return the models and the size by the numbers of `build-repo plan --pods`.

    The numbers are for the `load:` and `machine:` of a models.yaml; the `replicas` share the requests equally. Raises
    SpecError if a model that is deployed has no load there, or the load is too high.
    """
    from builder.options import load_specs
    from builder.serving.plan.machine import plan  # loads torch

    plans, machine = plan(load_specs(file), replicas)
    by_name = {one.name: one for one in plans}
    missing = [model.name for model in models if model.name not in by_name]
    if missing:
        raise SpecError(
            f"{file} has no load for {missing[0]}, which is to be deployed; it has one for {', '.join(by_name)}"
        )
    lacking = [f"{one.name}: {text}" for one in plans for text in one.lacking] + list(machine.lacking)
    if lacking:
        raise SpecError(
            f"{file}: the load cannot be held ({lacking[0]}); see all: build-repo plan {file} --pods {replicas}"
        )
    cache = machine.response_cache or RESPONSE_CACHE
    size = ReplicaSize(cores or machine.cores, machine.memory, machine.shm, cache, machine.gpus)
    return tuple(replace(model, plan=by_name[model.name]) for model in models), size


def _cores(plans: Sequence[ModelPlan]) -> int:
    open_ended = [plan.name for plan in plans if plan.cores is None]
    if open_ended:
        raise SpecError(f"{open_ended[0]} takes all cores that it finds; say how many a replica has: --cores N")
    return max(1, *(round(plan.cores or 0) for plan in plans))
