"""ONNX Runtime on a GPU: which operators it has CUDA kernels for, in which types of real numbers.

The table is ONNX Runtime's own list (`scripts/releases --kernels`), of the versions from 1.23.0 on; what an older one
is asked for are operators that it has had in fp32 and fp16 since long before.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from builder.engines.releases import RELEASES, version_tuple
from builder.errors import SpecError

KERNELS: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("cuda_kernels.json").read_text("utf-8"))


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
