"""TensorRT as an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.errors import SpecError
from builder.engines import GraphEngine, Infer, onnxruntime
from builder.runtime.contract import Session

if TYPE_CHECKING:
    from builder.engines.encoding import EncodingEngine
    from builder.engines.placement import Placement
    from builder.engines.profiles import Calls
    from builder.engines.stock import Signature
    from builder.graphs.onnx.graph import Graph
    from builder.options import BuildSpec


class TensorRt(GraphEngine):
    def infer(self, graph: Graph, threads: int, spinning: bool = False) -> Infer:
        """Open the ONNX that a plan is compiled from, on the CPU."""
        return onnxruntime.infer(graph, threads, spinning)

    def place(self, options: BuildSpec, graph: Graph, calls: Calls) -> Placement:
        from builder.engines.tensorrt.placement import place

        return place(options, graph, calls)

    def session(self, graph: Graph, threads: int, spinning: bool) -> Session:
        raise SpecError("a TensorRT plan runs in a Triton model of its own: leave --executor out")

    def served_version(self, triton: str, in_process: bool) -> str:
        raise SpecError("a TensorRT plan runs on a GPU, and there is none here to run it in another version")

    def half_constants(self, graph: Graph) -> bool:
        return onnxruntime.half_constants(graph)

    def signature(self, model: Path) -> Signature:
        """Return the inputs and outputs of `model`, the ONNX that a plan is compiled from."""
        return onnxruntime.signature(model)

    @property
    def encoding(self) -> EncodingEngine:
        from builder.engines.tensorrt.encoding import TensorRtEncoding

        return TensorRtEncoding()


ENGINE = TensorRt()
