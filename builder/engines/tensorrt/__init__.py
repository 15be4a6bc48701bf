"""TensorRT as an engine: plans, which belong to one TensorRT and one kind of GPU and are compiled where they run.

Nothing here needs TensorRT: on the machine that builds, a graph for it is opened in ONNX Runtime on the CPU, which
runs the same standard operators. Precision is in the graph (strongly typed networks): TensorRT 10 has both that and
the older flags, 11 has that alone. Knows files; knows nothing about checkpoints or tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.engines import Infer, onnxruntime

if TYPE_CHECKING:
    from builder.onnx.graph import Graph

BACKEND = "tensorrt"
PLATFORM = "tensorrt_plan"
MODEL_FILE = "model.plan"
LEAST = "10.0"  # strongly typed networks of all the types used here, and int64 inputs


def infer(graph: Graph, threads: int, spinning: bool = False) -> Infer:
    """Open the ONNX that a plan is compiled from, on the CPU."""
    return onnxruntime.infer(graph, threads, spinning)


def parameters(graph: Graph, threads: int, instances: int) -> dict[str, str]:
    """Triton's TensorRT backend needs none."""
    return {}
