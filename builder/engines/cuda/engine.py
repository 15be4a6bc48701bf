"""ONNX Runtime on a GPU: its decoders, and its products by matrices of few bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from builder.engines.onnxruntime.engine import OnnxRuntime
from builder.runtime.contract import CacheType, LayerShape
from builder.runtime.generation.executors.base import Geometry
from builder.runtime.generation.executors.onnxruntime_cuda_blocks import block_tokens

if TYPE_CHECKING:
    from builder.engines.decoding import DecodingEngine
    from builder.engines.eight_bit import EightBitProducts
    from builder.engines.encoding import EncodingEngine


class OnnxRuntimeOnCuda(OnnxRuntime):
    def block_tokens(self, layers: Sequence[LayerShape]) -> int:
        return block_tokens(Geometry.pairs(layers))

    def block_bytes(self, layers: Sequence[LayerShape], cache: CacheType) -> int:
        from builder.engines.cuda.blocks import block_bytes

        return block_bytes(layers, cache)

    @property
    def encoding(self) -> EncodingEngine | None:
        return None  # ONNX Runtime's own has the variants of encoders on a GPU

    @property
    def decoding(self) -> type[DecodingEngine]:
        from builder.engines.cuda.decoding import CudaDecoding

        return CudaDecoding

    @property
    def eight_bit(self) -> type[EightBitProducts]:
        from builder.engines.cuda.weights import CudaEightBit

        return CudaEightBit


ENGINE = OnnxRuntimeOnCuda()
