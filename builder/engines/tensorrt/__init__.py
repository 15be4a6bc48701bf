"""TensorRT as an engine: plans, which belong to one TensorRT and one kind of GPU and are compiled where they run.

Nothing here needs TensorRT: on the machine that builds, a graph for it is opened in ONNX Runtime on the CPU, which
runs the same standard operators. Precision is in the graph (strongly typed networks): TensorRT 10 has both that and
the older flags, 11 has that alone. Knows files; knows nothing about checkpoints or tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from builder.common.errors import SpecError
from builder.common.releases import RELEASES, version_tuple, with_tensorrt
from builder.engines import Infer, onnxruntime
from builder.runtime.contract import Session

if TYPE_CHECKING:
    from builder.graphs.onnx.graph import Graph

BACKEND = "tensorrt"
NAME = "TensorRT"
PACKAGE = "tensorrt"
ROWS_ARE_AN_AXIS = False
PLATFORM = "tensorrt_plan"
MODEL_FILE = "model.plan"
LEAST = "10.0"  # strongly typed networks of all the types used here, and int64 inputs


def infer(graph: Graph, threads: int, spinning: bool = False) -> Infer:
    """Open the ONNX that a plan is compiled from, on the CPU."""
    return onnxruntime.infer(graph, threads, spinning)


def buckets(max_rows: int, max_length: int, token_budget: int) -> tuple[tuple[int, int], ...]:
    """Return no shapes: a plan's profiles take any shape between their bounds."""
    return ()


def session(graph: Graph, threads: int, spinning: bool) -> Session:
    raise SpecError("a TensorRT plan runs in a Triton model of its own: leave --executor out")


def refuse_release(triton: str) -> None:
    """Raise SpecError for a Triton release whose TensorRT is too old for graphs that state their precision."""
    has = RELEASES[triton].tensorrt
    if has is not None and version_tuple(has) < version_tuple(LEAST):
        raise SpecError(
            f"Triton {triton} has TensorRT {has}; graphs that state their precision in their types need "
            f"{LEAST}: use --triton {with_tensorrt(LEAST)[0]} or later"
        )


def served_version(triton: str, in_process: bool) -> str:
    raise SpecError("a TensorRT plan runs on a GPU, and there is none here to run it in another version")


def half_constants(graph: Graph) -> bool:
    """Return True if the ONNX that a plan is compiled from has weights in fp16."""
    return onnxruntime.half_constants(graph)


def wrong_cpus(graph: Graph) -> tuple[str, ...]:
    """Return none: it runs on a GPU."""
    return ()
