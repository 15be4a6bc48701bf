"""ONNX Runtime on a GPU, for decoders: encoders on a GPU are variants of ONNX Runtime's own."""

from __future__ import annotations

from collections.abc import Sequence

from builder.engines.onnxruntime.engine import OnnxRuntime
from builder.runtime.contract import LayerShape
from builder.runtime.generation.executors.base import Geometry
from builder.runtime.generation.executors.onnxruntime_cuda_blocks import block_tokens


class OnnxRuntimeOnCuda(OnnxRuntime):
    def block_tokens(self, layers: Sequence[LayerShape]) -> int:
        return block_tokens(Geometry.pairs(layers))


ENGINE = OnnxRuntimeOnCuda()
