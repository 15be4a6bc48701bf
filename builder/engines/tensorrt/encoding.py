"""TensorRT's plans of encoders."""

from __future__ import annotations

from typing import ClassVar

from builder.engines.encoding import Encoders, EncodingEngine, Variant
from builder.engines.tensorrt import BACKEND, refuse_release
from builder.engines.tensorrt.lowering import for_tensorrt
from builder.onnx.graph import Graph


class Encoding(EncodingEngine):
    name = BACKEND
    called: ClassVar = {"tensorrt": "TensorRT"}
    preference = 2
    half_beside_bytes = True  # ONNX Runtime's TensorRT allows one lower precision, which is int8
    variants = tuple(
        Variant(precision, BACKEND, target="tensorrt") for precision in ("fp32", "fp16", "bf16", "int8-static", "fp8")
    )

    def source(self, encoders: Encoders, target: str) -> Graph:
        return for_tensorrt(encoders.plain, encoders.folder)

    def refuse_release(self, target: str, triton: str) -> None:
        refuse_release(triton)
