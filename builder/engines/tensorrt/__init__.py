"""TensorRT: plans, which belong to one TensorRT and one kind of GPU and are compiled where they run.

Nothing here needs TensorRT: on the machine that builds, a graph for it is opened in ONNX Runtime on the CPU, which
runs the same standard operators. Precision is in the graph (strongly typed networks): TensorRT 10 has both that and
the older flags, 11 has that alone. Knows files; knows nothing about checkpoints or tasks.
"""

from __future__ import annotations

from builder.common.errors import SpecError
from builder.common.releases import RELEASES, releases_with_tensorrt, version_tuple

BACKEND = "tensorrt"
PLATFORM = "tensorrt_plan"
MIN_VERSION = "10.0"  # strongly typed networks of all the types used here, and int64 inputs


def refuse_release(triton: str) -> None:
    """Raise SpecError for a Triton release whose TensorRT is too old for strongly typed graphs."""
    has = RELEASES[triton].tensorrt
    if has is not None and version_tuple(has) < version_tuple(MIN_VERSION):
        raise SpecError(
            f"Triton {triton} has TensorRT {has}; graphs that state their precision in their types need "
            f"{MIN_VERSION}: use --triton {releases_with_tensorrt(MIN_VERSION)[0]} or later"
        )
