"""ONNX Runtime on a GPU: what its provider is told, and which operators it has CUDA kernels for, in which types.

The table is ONNX Runtime's own list (`scripts/releases --kernels`), of the versions from 1.23.0 on; what an older one
is asked for are operators that it has had in fp32 and fp16 since long before.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from builder.engines.releases import RELEASES, version_tuple
from builder.errors import SpecError

if TYPE_CHECKING:
    from builder.spec import Gpu

KERNELS: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("cuda_kernels.json").read_text("utf-8"))
# The numbers by which Triton's ONNX Runtime backend knows the values of these options.
NUMBERS = {
    "cudnn_conv_algo_search": {"EXHAUSTIVE": "0", "HEURISTIC": "1", "DEFAULT": "2"},
    "arena_extend_strategy": {"kNextPowerOfTwo": "0", "kSameAsRequested": "1"},
}


def provider_options(gpu: Gpu) -> dict[str, str]:
    """What ONNX Runtime's CUDA provider reads, but for the device."""
    options: dict[str, str] = {
        "cudnn_conv_algo_search": gpu.cudnn_conv_algo_search,
        "arena_extend_strategy": gpu.arena_extend_strategy,
        "use_tf32": "0",  # fp32 is fp32, as it was when the answers were compared
    }
    if gpu.memory_limit_mb is not None:
        options["gpu_mem_limit"] = str(gpu.memory_limit_mb << 20)
    return options


def without_kernel(operators: Collection[str], precision: str, triton: str) -> list[str]:
    """Those of `operators` that work on real numbers and have no CUDA kernel in `precision` in a Triton release.

    Raises SpecError where that is not known.
    """
    wanted = version_tuple(RELEASES[triton].onnxruntime)
    listed = [version for version in KERNELS if version_tuple(version) <= wanted]
    if not listed and precision == "bf16":
        first = next(
            n for n, r in RELEASES.items() if version_tuple(r.onnxruntime) >= version_tuple(next(iter(KERNELS)))
        )
        raise SpecError(
            f"which bf16 kernels the ONNX Runtime of Triton {triton} has for CUDA is not known: use --precision fp16, "
            f"or --triton {first} or later"
        )
    kernels = KERNELS[listed[-1] if listed else next(iter(KERNELS))]
    return sorted(name for name in set(operators) & set(kernels) if precision not in kernels[name])
