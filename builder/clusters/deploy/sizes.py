"""Resources of a replica: what its models take as built, what a planned load takes, or models on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from builder.clusters.deploy.deployment import PLAIN, DeployedModel, LoadingOnDemand, ReplicaSize
from builder.clusters.deploy.on_demand import GATEWAYS
from builder.common.errors import SpecError
from builder.repository.config.arguments import RESPONSE_CACHE
from builder.serving.gateway.residency.memory_budget import MAX_CONCURRENT_LOADS, SERVER_BYTES
from builder.serving.plan.lines import ModelPlan, all_memory, all_shared_memory, gpu_count, megabytes


def as_built(models: Sequence[DeployedModel], cores: int | None, memory: int | None = None) -> ReplicaSize:
    """Return the size with `cores` and `memory` bytes, or what the models take.

    Raises SpecError if neither is known.
    """
    plans = [model.plan for model in models]
    unknown = [plan.name for plan in plans if not plan.memory]
    if memory is None and unknown:
        raise SpecError(
            f"{unknown[0]} is downloaded where it is served, and the size of its weights was not known to its build: "
            "say how much memory a replica has: --memory-gb N"
        )
    gpus = gpu_count(device for plan in plans for device in plan.gpu_memory)
    size = memory or all_memory(plans)
    return ReplicaSize(cores or _cores(plans), size, all_shared_memory(plans), RESPONSE_CACHE, gpus)


def as_loaded_on_demand(models: Sequence[DeployedModel], on_demand: LoadingOnDemand, cores: int | None) -> ReplicaSize:
    """Return the size of a Triton into which gateways load models on demand.

    A gateway counts estimates of what it loads, so memory is added for what a plan has beyond them. It does not know
    of the loads that another gateway has begun: the burst is as many of the largest models as that loads at once, but
    no more than it may use. Raises SpecError for a model without room.
    """
    on_gpu = [model.name for model in models if model.target != "cpu" or model.container != PLAIN]
    if on_gpu:
        raise SpecError(
            f"--load-on-demand counts the memory of processes, and {on_gpu[0]} takes that of a GPU: deploy it by "
            "itself, without --load-on-demand (--model NAME)"
        )
    by_name = {model.name: model for model in models}
    unknown = [name for name in on_demand.pins if name not in by_name]
    if unknown:
        raise SpecError(f"--pin {unknown[0]}: it is not deployed; there are {', '.join(by_name)}")
    left = on_demand.memory - SERVER_BYTES - sum(by_name[name].estimate for name in on_demand.pins)
    others = [model for model in models if model.name not in on_demand.pins]
    largest = max(others, key=lambda model: model.estimate, default=None)
    if left < (0 if largest is None else largest.estimate):
        needs = f"{largest.name} needs {megabytes(largest.estimate)}" if largest else "the pinned models need more"
        raise SpecError(
            f"--memory-gb {on_demand.memory / 1e9}: {needs}, and {megabytes(max(0, left))} are left beside the server "
            "and pinned models: raise it, or pin fewer"
        )
    beyond = sum(_beyond(model) for model in _filling(models, on_demand.memory, _beyond))
    loads = sorted((model.plan.memory for model in others), reverse=True)[:MAX_CONCURRENT_LOADS]
    burst = (GATEWAYS - 1) * min(on_demand.memory, sum(loads))
    shm = all_shared_memory(model.plan for model in _filling(models, on_demand.memory, lambda model: model.plan.shm))
    cores = cores or _cores([model.plan for model in models])
    return ReplicaSize(cores, on_demand.memory + beyond, shm, RESPONSE_CACHE, burst=burst)


def _beyond(model: DeployedModel) -> int:
    """Return the bytes by which a model's plan exceeds what a gateway counts for it."""
    return max(0, model.plan.memory - model.estimate)


def _filling(
    models: Sequence[DeployedModel], memory: int, value: Callable[[DeployedModel], int]
) -> list[DeployedModel]:
    """Return models whose sum of `value` is at least that of any models that fit into `memory` bytes together."""
    chosen = []
    for model in sorted(models, key=lambda model: value(model) / max(1, model.estimate), reverse=True):
        if memory <= 0:
            break
        chosen.append(model)
        memory -= model.estimate
    return chosen


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
        raise SpecError(
            f"how many cores {open_ended[0]} needs is not known, as it was built without --threads or computes on a "
            "GPU: say how many a replica has, --cores N"
        )
    return max(1, *(round(plan.cores or 0) for plan in plans))
