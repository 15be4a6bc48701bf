"""What N pods hold: all models in each and the requests divided, or the models where one has no room for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from builder.plan.lines import Plan
from builder.plan.process import all_gpu_memory, all_memory, all_shared_memory


@dataclass(frozen=True)
class PodSize:
    """What Triton may take in a pod. `memory`, `shm`: bytes; `shm`: None where /dev/shm is made as large as needed;
    `gpus`: bytes of each card."""

    cores: float
    memory: float
    shm: int | None = None
    gpus: tuple[float, ...] = ()


@dataclass(frozen=True)
class Pod:
    """The models of one pod, and what they take."""

    plans: tuple[Plan, ...] = ()

    @property
    def memory(self) -> int:
        return all_memory(self.plans)

    @property
    def shm(self) -> int:
        return all_shared_memory(self.plans)

    @property
    def cores(self) -> float:
        """The cores that texts and tokens keep busy, of models whose speed is known."""
        return sum(plan.cores or 0.0 for plan in self.plans)

    def fits(self, size: PodSize) -> bool:
        on_cards = all(taken <= size.gpus[device] for device, taken in all_gpu_memory(self.plans).items())
        shm = size.shm is None or self.shm <= size.shm
        return self.memory <= size.memory and shm and self.cores <= size.cores and on_cards


def divided(plans: Sequence[Plan], pods: int, size: PodSize) -> tuple[tuple[Pod, ...], tuple[Plan, ...]]:
    """Each model in one of `pods` pods, the largest first, in the first that has room; and those that no pod has room
    for (first-fit decreasing: Johnson, Near-optimal bin packing algorithms, 1973).
    """
    filled, left = [Pod()] * pods, []
    for plan in sorted(plans, key=lambda plan: plan.memory, reverse=True):
        with_it = [replace(pod, plans=(*pod.plans, plan)) for pod in filled]
        number = next((index for index, pod in enumerate(with_it) if pod.fits(size)), None)
        if number is None:
            left.append(plan)
        else:
            filled[number] = with_it[number]
    return tuple(filled), tuple(left)


def pods_needed(plans: Sequence[Plan], size: PodSize) -> int | None:
    """The fewest pods among which all models can be divided so; None where one of them has no room in any."""
    return next((n for n in range(1, len(plans) + 1) if not divided(plans, n, size)[1]), None)
