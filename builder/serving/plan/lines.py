"""Define the lines of a plan: a quantity, the formula with its numbers, the result; and what a process takes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from builder.engines.gpu import SERVER_ON_CARD

# Bytes of a process with Python, numpy, tokenizers and ONNX Runtime, measured on the embedded server
PROCESS = 84_000_000
REGION = 1 << 20  # python_backend, README: shm-default-byte-size
MIN_SHARED_MEMORY = 256 << 20  # minimum that `build-repo serve` requires
SHARED_MEMORY_STEP = 64 << 20  # /dev/shm is rounded up to a multiple of this
SERVER = 125_000_000  # bytes of tritonserver (measured: 34 to 83 MB) and of its liveness model (23 MB)


@dataclass(frozen=True)
class PlanLine:
    """One step of the arithmetic. `formula` has the numbers filled in."""

    quantity: str
    formula: str
    result: str


@dataclass(frozen=True)
class SpeedPlan:
    """Consequences of a measured speed.

    `cores`: busy cores; `rows`: an encoder's batch, or the slots of a loop; `token_budget`: of an encoder's calls.
    """

    lines: Sequence[PlanLine]
    settings: Mapping[str, object]
    lacking: Sequence[str]
    cores: float
    rows: int
    token_budget: int = 0


@dataclass(frozen=True)
class ModelPlan:
    """Plan of one model.

    `settings`: keys of models.yaml, dotted, and their values. `lacking`: one sentence for each missing resource; empty
    if the load can be served. `cores`: the number that its texts and tokens alone keep busy. `memory`, `shm`: bytes.
    `gpu_memory`: bytes on each card, by its number.
    """

    name: str
    lines: tuple[PlanLine, ...]
    settings: Mapping[str, object]
    memory: int
    shm: int
    cores: float | None = None
    response_cache: int = 0
    lacking: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    gpu_memory: Mapping[int, int] = field(default_factory=dict)


def number(value: float) -> str:
    """Return `value` with three significant digits, without an exponent."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def megabytes(size: float) -> str:
    return f"{number(size / 1e6)} MB"


def power_of_two(value: float) -> int:
    """Return the smallest power of two that is at least `value`."""
    return 1 << max(0, (max(1, int(-(-value // 1))) - 1).bit_length())


def memory_lines(
    instances: int,
    weights: int,
    requests: int,
    request_bytes: int,
    answer_bytes: int,
    call: int = 0,
    besides: Mapping[str, int] = MappingProxyType({}),
) -> tuple[tuple[PlanLine, PlanLine], int, int]:
    """Return lines for the resident bytes and for those of /dev/shm, and the two numbers.

    Each instance has its own process, weights and memory for calls. All `requests` that are in an instance at once are
    as large as their limits allow. `besides`: other bytes, by what they are of.
    """
    size = instances * (PROCESS + weights + call) + sum(besides.values())
    of_call = f" + {megabytes(call)} of the largest call" if call else ""
    parts = f"{instances} x ({megabytes(PROCESS)} of Python + {megabytes(weights)} of weights{of_call})"
    formula = parts + "".join(f" + {megabytes(part)} of {what}" for what, part in besides.items() if part)
    shared = instances * (REGION + requests * (request_bytes + answer_bytes))
    shared_formula = (
        f"{instances} x (1 MiB + {number(requests)} requests x ({number(request_bytes)} bytes of texts at most + "
        f"{number(answer_bytes)} of an answer))"
    )
    memory = PlanLine("memory", formula, megabytes(size))
    return (memory, PlanLine("/dev/shm", shared_formula, megabytes(shared))), size, shared


def all_memory(plans: Iterable[ModelPlan]) -> int:
    """Return the resident bytes of a server with all these models."""
    return SERVER + sum(plan.memory for plan in plans)


def all_gpu_memory(plans: Iterable[ModelPlan]) -> dict[int, int]:
    """Return the bytes on each card that any of these models uses, by card number, including the server's."""
    by_card: dict[int, int] = {}
    for device, size in (item for plan in plans for item in plan.gpu_memory.items()):
        by_card[device] = by_card.get(device, SERVER_ON_CARD) + size
    return dict(sorted(by_card.items()))


def gpu_count(devices: Iterable[int]) -> int:
    """Return the number of cards a container needs to have these, counted from number 0."""
    return max((device + 1 for device in devices), default=0)


def all_shared_memory(plans: Iterable[ModelPlan]) -> int:
    """Return the bytes of /dev/shm of a server with all these models."""
    needed = max(MIN_SHARED_MEMORY, sum(plan.shm for plan in plans))
    return math.ceil(needed / SHARED_MEMORY_STEP) * SHARED_MEMORY_STEP
