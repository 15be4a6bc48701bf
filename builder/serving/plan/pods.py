"""Divide models among N pods: all models in each pod, which share the requests, or each model in one pod.

The models are divided if they do not all fit into one pod.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from builder.serving.plan.lines import ModelPlan, all_gpu_memory, all_memory, all_shared_memory


@dataclass(frozen=True)
class PodSize:
    """Resources for Triton in a pod.

    `memory`, `shm`: bytes. `shm`: None if /dev/shm is sized as needed. `gpus`: bytes of each card.
    """

    cores: float
    memory: float
    shm: int | None = None
    gpus: tuple[float, ...] = ()


@dataclass(frozen=True)
class Pod:
    """Models of one pod, and their needs."""

    plans: tuple[ModelPlan, ...] = ()

    @property
    def memory(self) -> int:
        return all_memory(self.plans)

    @property
    def shm(self) -> int:
        return all_shared_memory(self.plans)

    @property
    def cores(self) -> float:
        """Cores that texts and tokens keep busy, for models of known speed."""
        return sum(plan.cores or 0.0 for plan in self.plans)

    def fits(self, size: PodSize) -> bool:
        on_cards = all(taken <= size.gpus[device] for device, taken in all_gpu_memory(self.plans).items())
        shm = size.shm is None or self.shm <= size.shm
        return self.memory <= size.memory and shm and self.cores <= size.cores and on_cards


def divide_models(
    plans: Sequence[ModelPlan], pods: int, size: PodSize
) -> tuple[tuple[Pod, ...], tuple[ModelPlan, ...]]:
    """Put each model, the largest first, into the first of `pods` pods where it fits; also return the rest.

    This is first-fit decreasing (Johnson, Near-optimal bin packing algorithms, 1973).
    """
    filled, rest = [Pod()] * pods, list[ModelPlan]()
    for plan in sorted(plans, key=lambda plan: plan.memory, reverse=True):
        with_it = [replace(pod, plans=(*pod.plans, plan)) for pod in filled]
        number = next((index for index, pod in enumerate(with_it) if pod.fits(size)), None)
        if number is None:
            rest.append(plan)
        else:
            filled[number] = with_it[number]
    return tuple(filled), tuple(rest)


def pods_needed(plans: Sequence[ModelPlan], size: PodSize) -> int | None:
    """Return the fewest pods that all models can be divided among; None if a model does not fit into any pod."""
    return next((n for n in range(1, len(plans) + 1) if not divide_models(plans, n, size)[1]), None)
