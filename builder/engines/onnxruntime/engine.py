"""ONNX Runtime as an engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from builder.common.releases import runtime_of
from builder.engines import GraphEngine, Infer, onnxruntime
from builder.runtime.contract import Session

if TYPE_CHECKING:
    from builder.engines.decoding import DecodingEngine
    from builder.engines.eight_bit import EightBitProducts
    from builder.engines.encoding import EncodingEngine
    from builder.engines.placement import Placement
    from builder.engines.profiles import Calls
    from builder.engines.stock import Signature
    from builder.graphs.onnx.graph import Graph
    from builder.options import BuildSpec


class OnnxRuntime(GraphEngine):
    def infer(self, graph: Graph, threads: int, spinning: bool = False) -> Infer:
        return onnxruntime.infer(graph, threads, spinning)

    def place(self, options: BuildSpec, graph: Graph, calls: Calls) -> Placement:
        from builder.engines.onnxruntime.placement import place

        return place(options, graph, calls)

    def session(self, graph: Graph, threads: int, spinning: bool) -> Session:
        """Return the session of an encoder in process. Its threads spin within a call and rest after it.

        By default each spins for many times as long as a short text takes, on cores that are needed to send the answer.
        """
        return onnxruntime.resting(onnxruntime.loop_session(threads, spinning))

    def served_version(self, triton: str, in_process: bool) -> str:
        return runtime_of(triton, in_process)

    def half_constants(self, graph: Graph) -> bool:
        return onnxruntime.half_constants(graph)

    def signature(self, model: Path) -> Signature:
        return onnxruntime.signature(model)

    @property
    def encoding(self) -> EncodingEngine | None:
        from builder.engines.onnxruntime.encoding import OnnxRuntimeEncoding

        return OnnxRuntimeEncoding()

    @property
    def decoding(self) -> type[DecodingEngine]:
        from builder.engines.onnxruntime.decoding import OnnxRuntimeDecoding

        return OnnxRuntimeDecoding

    @property
    def eight_bit(self) -> type[EightBitProducts]:
        from builder.engines.onnxruntime.weights import OnnxRuntimeEightBit

        return OnnxRuntimeEightBit


ENGINE = OnnxRuntime()
