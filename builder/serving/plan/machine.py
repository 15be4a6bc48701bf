"""Plan all models of a machine together: whether they fit, and the needs of the container that serves them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from builder.common.errors import SpecError
from builder.engines.gpu import HEADROOM, SERVER_ON_CARD
from builder.options import BuildSpec, Capacity, Load, Machine
from builder.repository.layout.encoder import queue_limits
from builder.serving.plan.encoder import plan_encoder
from builder.serving.plan.generating import plan_generating
from builder.serving.plan.gpu import plan_on_gpu
from builder.serving.plan.lines import (
    SHARED_MEMORY_STEP,
    ModelPlan,
    PlanLine,
    all_gpu_memory,
    all_memory,
    all_shared_memory,
    gpu_count,
    megabytes,
    number,
)
from builder.serving.plan.needs import ModelNeeds, needs_of

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class MachinePlan:
    """Totals of a machine.

    `lacking`: one sentence for each missing resource. `shm`, `memory`, `response_cache`: bytes. `gpus`: number of
    cards, from the first to the last that a model is on.
    """

    lines: tuple[PlanLine, ...]
    cores: int
    memory: int
    shm: int
    response_cache: int
    lacking: tuple[str, ...]
    gpus: int = 0

    def compose(self, service: str) -> str:
        """Return a file for `docker compose -f docker-compose.yml -f FILE` with these numbers for one service.

        Files in /dev/shm count as memory of the container. Sizes are texts, as in docker-compose.yml: podman-compose
        does not merge a number with a text.
        """
        sizes = {"shm_size": f"{self.shm}b", "mem_limit": f"{self.memory + self.shm}b"}
        settings: dict[str, object] = {**sizes, "cpus": self.cores}
        head = "# Written by build-repo plan; give it after docker-compose.yml.\n"
        if self.gpus:  # in place of all cards (https://docs.docker.com/reference/compose-file/merge/)
            device = {"driver": "nvidia", "count": self.gpus, "capabilities": ["gpu"]}
            settings["deploy"] = {"resources": {"reservations": {"devices": _ReplacedList([device])}}}
        return head + yaml.dump({"services": {service: settings}}, Dumper=_Dumper, sort_keys=False)


class _ReplacedList(list[object]):
    """List that replaces another file's, where Compose would otherwise append to it."""


class _Dumper(yaml.SafeDumper):
    """Dumper that supports _ReplacedList."""


_Dumper.add_representer(_ReplacedList, lambda dumper, entry: dumper.represent_sequence("!override", entry))


def plan(specs: Sequence[BuildSpec], pods: int = 1) -> tuple[tuple[ModelPlan, ...], MachinePlan]:
    """Plan each model with a load, and all of them together on one of `pods` equal machines that share the requests.

    Raises SpecError and other BuilderErrors.
    """
    loaded = [(spec, spec.load.shared_by(pods)) for spec in specs if spec.load is not None]
    if not loaded:
        raise SpecError(
            "no model states a load; add one to each model that is to be planned (load: {requests_per_s: ...})"
        )
    machines = {spec.machine for spec, _ in loaded}
    if len(machines) > 1:
        raise SpecError(
            "a plan is for one machine, and the models state different ones; put `machine:` into `defaults:`"
        )
    plans = tuple(_plan(spec, load, needs_of(spec)) for spec, load in loaded)
    first = loaded[0][0]
    return plans, _machine(first.capacity, first.machine, plans)


def _plan(spec: BuildSpec, load: Load, needs: ModelNeeds) -> ModelPlan:
    if needs.kind == "generation":
        return plan_on_gpu(spec, load, needs) if spec.target != "cpu" else plan_generating(spec.capacity, load, needs)
    if spec.adapters and load.distinct_texts is not None:
        raise SpecError(
            f"{spec.entry_name}: distinct_texts sizes a response cache, which --adapters cannot have: leave one out"
        )
    found = plan_on_gpu(spec, load, needs) if spec.target != "cpu" else plan_encoder(spec.capacity, load, needs)
    return replace(found, notes=(*found.notes, _queue_note(spec)))


def _queue_note(options: BuildSpec) -> str:
    """Return the limits that a build with these options would have, as a sentence."""
    limits, serving = queue_limits(options), options.serving
    if not limits.size and not limits.timeout_us:
        return "nothing limits how many requests wait, nor for how long (serving.queue)"
    many = f"at most {limits.size} requests" if limits.size else "any number of requests"
    many += " of each priority" if serving.priority_levels else ""
    late = ", and then behind all others" if serving.queue.timeout_action == "DELAY" else ""
    time = f"for at most {number(limits.timeout_us / 1e6)} s{late}" if limits.timeout_us else "for any time"
    keeper = "the front" if limits.by_front else "Triton's batcher, which pauses where it has limits,"
    return f"{keeper} lets {many} wait, each {time} (serving.queue)"


def _machine(capacity: Capacity, machine: Machine, plans: Sequence[ModelPlan]) -> MachinePlan:
    cores, usable, shm_mb = capacity.cores, capacity.memory, machine.shm_mb
    memory, shm = all_memory(plans), all_shared_memory(plans)
    if shm_mb is not None:
        there = f"{shm_mb} MiB"
    elif SHARED_MEMORY.is_dir():
        there = f"{shutil.disk_usage(SHARED_MEMORY).total >> 20} MiB here"
    else:
        there = "unknown"
    known = [plan.cores for plan in plans if plan.cores is not None]
    lines = [
        PlanLine(
            "memory",
            " + ".join(["server", *(plan.name for plan in plans)]),
            f"{megabytes(memory)} of {megabytes(usable)}",
        ),
        PlanLine("/dev/shm", f"to the next {SHARED_MEMORY_STEP >> 20} MiB", f"{shm >> 20} MiB of {there}"),
    ]
    lacking = []
    if known:
        lines.append(PlanLine("busy cores", " + ".join(map(number, known)), f"{number(sum(known))} of {cores}"))
        if sum(known) > cores:
            lacking.append(
                f"the models keep {number(sum(known))} cores busy and the machine has {cores}. What helps: more cores, "
                "or some of the models on another machine"
            )
    if memory > usable:
        lacking.append(
            f"the models need {megabytes(memory)} and {megabytes(usable)} may be used. What helps: fewer models"
        )
    if shm_mb is not None and shm > shm_mb << 20:
        lacking.append(
            f"/dev/shm needs {shm >> 20} MiB and has {shm_mb}. What helps: a larger one (docker: --shm-size), or lower "
            "serving.limits.request_bytes"
        )
    cache = sum(plan.response_cache for plan in plans)
    if cache:
        formula = " + ".join(plan.name for plan in plans if plan.response_cache)
        lines.append(PlanLine("response cache", formula, f"--cache-config=local,size={cache}"))
    on_cards, crowded = _gpus(machine, plans)
    lines += on_cards
    count = gpu_count(device for plan in plans for device in plan.gpu_memory)
    return MachinePlan(tuple(lines), cores, memory, shm, cache, (*lacking, *crowded), count)


def _gpus(machine: Machine, plans: Sequence[ModelPlan]) -> tuple[list[PlanLine], list[str]]:
    """Return lines for the models' total on each card, and sentences for the cards that are too small."""
    lines, lacking = [], []
    for device, size in all_gpu_memory(plans).items():
        card, on_it = machine.gpus[device], [plan for plan in plans if device in plan.gpu_memory]
        may = HEADROOM * card.memory
        parts = [f"{megabytes(SERVER_ON_CARD)} of the server", *(plan.name for plan in on_it)]
        total = f"{megabytes(size)} of {megabytes(may)}"
        lines.append(PlanLine(f"GPU {device} ({card.name})", " + ".join(parts), total))
        if size > may and len(on_it) > 1:
            names = ", ".join(plan.name for plan in on_it)
            lacking.append(
                f"GPU {device} ({card.name}) has {megabytes(may)} and {names} need {megabytes(size)}. What helps: some "
                "of them on another card (gpu: {devices: [...]})"
            )
    return lines, lacking
