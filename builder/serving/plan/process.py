"""Compute the memory and shared memory that a Python process of Triton takes besides the model."""

from __future__ import annotations

import math
from collections.abc import Iterable

from builder.serving.plan.lines import ModelPlan, PlanLine, megabytes, number

PROCESS = (
    84_000_000  # bytes of a process with Python, numpy, tokenizers and ONNX Runtime, measured on the embedded server
)
REGION = 1 << 20  # python_backend, README: shm-default-byte-size
SHARED_MEMORY_LEAST = 256 << 20  # minimum that `build-repo serve` requires
SHARED_MEMORY_STEP = 64 << 20  # /dev/shm is rounded up to a multiple of this
SERVER = 125_000_000  # bytes of tritonserver (measured: 34 to 83 MB) and of its liveness model (23 MB)
# bytes of a card that CUDA takes in each process with all of its kernels; 287 MB if they are loaded when they are
# needed, CUDA's default on Linux since 12.2 (PyTorch, pull request 86509)
CONTEXT = 667_000_000
SERVER_ON_CARD = CONTEXT + (64 << 20)  # with Triton's memory pool (--cuda-memory-pool-byte-size)


def memory_line(instances: int, weights: int, cache: int = 0, draft: int = 0) -> tuple[PlanLine, int]:
    """Return the resident bytes: each instance has its own process and its own weights."""
    total = instances * (PROCESS + weights) + cache + draft
    parts = f"{instances} x ({megabytes(PROCESS)} of Python + {megabytes(weights)} of weights)"
    besides = (("cache", cache), ("the draft", draft))
    formula = parts + "".join(f" + {megabytes(size)} of {what}" for what, size in besides if size)
    return PlanLine("memory", formula, megabytes(total)), total


def shared_memory_line(instances: int, requests: int, request_bytes: int, answer_bytes: int) -> tuple[PlanLine, int]:
    """Return the bytes of /dev/shm if all concurrent requests are as large as their limits allow."""
    size = instances * (REGION + requests * (request_bytes + answer_bytes))
    formula = (
        f"{instances} x (1 MiB + {number(requests)} requests x ({number(request_bytes)} bytes of texts at most + "
        f"{number(answer_bytes)} of an answer))"
    )
    return PlanLine("/dev/shm", formula, megabytes(size)), size


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
    needed = max(SHARED_MEMORY_LEAST, sum(plan.shm for plan in plans))
    return math.ceil(needed / SHARED_MEMORY_STEP) * SHARED_MEMORY_STEP
