"""GPUs: the compute capability that each precision needs, the memory of cards, and the GPUs of this machine."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from builder.common.cards import CARDS, GpuModel
from builder.common.engines import ENGINES
from builder.common.errors import SpecError
from builder.common.releases import RELEASES, version_tuple

if TYPE_CHECKING:
    from builder.options import BuildSpec, Gpu

HEADROOM = 0.9  # of a card's memory: CUDA and a step need the rest
# Bytes of a card that CUDA takes in each process with all of its kernels; 287 MB if they are loaded when they are
# needed, CUDA's default on Linux since 12.2 (PyTorch, pull request 86509)
CONTEXT = 667_000_000
SERVER_ON_CARD = CONTEXT + (64 << 20)  # with Triton's memory pool (--cuda-memory-pool-byte-size)
CUDA_13 = ("7.5", "CUDA 13.0 release notes")  # without Maxwell, Pascal and Volta


def least_capability(runs: str, precision: str, triton: str) -> tuple[str, str]:
    """Return the compute capability that `runs` needs in `precision` in a Triton release, and the source.

    `runs`: the engine of a whole checkpoint, or the target.
    """
    known = ENGINES[runs].compute_capabilities
    needs = [known[name] for name in ("any", precision) if name in known]
    if version_tuple(RELEASES[triton].cuda or "0") >= (13,):
        needs.append(CUDA_13)
    return max(needs, key=lambda need: version_tuple(need[0]))


def refuse_card(options: BuildSpec, runs: str) -> None:
    """Raise SpecError if the card of --gpu cannot run the request; `runs`: as in `least_capability`."""
    if options.gpu.card is None:
        return
    card = CARDS[options.gpu.card]
    least, source = least_capability(runs, options.precision, options.triton)
    if version_tuple(card.compute_capability) < version_tuple(least):
        fits = ", ".join(
            name for name, other in CARDS.items() if version_tuple(other.compute_capability) >= version_tuple(least)
        )
        raise SpecError(
            f"--gpu {options.gpu.card}: {options.precision} on --target {options.target}, Triton {options.triton}, "
            f"needs compute capability {least} ({source}), and this card has {card.compute_capability}; use "
            f"--precision fp16, an older --triton, or one of {fits}"
        )


def refuse_size(gpu: Gpu, needs: int, parts: str, advice: str, in_process: bool) -> None:
    """Raise SpecError if `needs` bytes, which are `parts`, do not fit into the card or its memory limit.

    On the card they are beside the server and, `in_process`, the CUDA context of the model's own process, which the
    limit of ONNX Runtime's arena does not count.
    """
    limit = gpu.memory_limit_mb
    if gpu.card is not None:
        beside = SERVER_ON_CARD + (CONTEXT if in_process else 0)
        of_card = int(CARDS[gpu.card].memory_mb * HEADROOM) - (beside >> 20)
        limit = of_card if limit is None else min(limit, of_card)
    if limit is not None and needs > limit << 20:
        raise SpecError(
            f"{parts} need {needs / 1e9:.1f} GB and {gpu.card or 'gpu.memory_limit_mb'} has room for "
            f"{(limit << 20) / 1e9:.1f} GB; {advice}"
        )


def gpus() -> tuple[GpuModel, ...]:
    """Return the NVIDIA GPUs that the driver sees, in its order; none if there is no driver."""
    lines = _query("name", "compute_cap", "memory.total")
    fields = [[part.strip() for part in line.rsplit(",", 2)] for line in lines]
    return tuple(GpuModel(name, capability, int(float(memory))) for name, capability, memory in fields)


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver; None if there is none."""
    return next(iter(_query("driver_version")), None)


def _query(*fields: str) -> list[str]:
    """Return a line of `fields` for each GPU; none if there is no driver."""
    command = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
