"""ONNX Runtime for encoders: on the CPU, on a GPU by CUDA, and on a GPU by its own TensorRT."""

from __future__ import annotations

from collections.abc import Collection
from typing import ClassVar

from builder.engines.cuda import without_kernel
from builder.engines.encoding import VNNI, Encoders, EncodingEngine, Variant
from builder.engines.key_lengths import count_keys
from builder.engines.onnxruntime import BACKEND
from builder.engines.tensorrt import refuse_release
from builder.engines.tensorrt.lowering import for_tensorrt
from builder.graphs.onnx.graph import Graph


class OnnxRuntimeEncoding(EncodingEngine):
    name = BACKEND
    titles: ClassVar = {"cpu": "", "cuda": "CUDA", "tensorrt": "TensorRT by ONNX Runtime"}
    variants = (
        Variant("fp32", BACKEND),
        Variant("fp16", BACKEND),
        Variant("int8", BACKEND, VNNI),
        Variant("int8-static", BACKEND, VNNI),
        Variant("int8-weights", BACKEND, VNNI),
        Variant("int4-weights", BACKEND, VNNI),
        *(Variant(precision, BACKEND, target="cuda") for precision in ("fp32", "fp16", "bf16")),
        *(Variant(precision, BACKEND, target="tensorrt") for precision in ("fp32", "fp16", "int8-static")),
    )

    def source(self, encoders: Encoders, target: str) -> Graph:
        if target == "tensorrt":
            return for_tensorrt(encoders.plain, encoders.folder)
        return count_keys(encoders.fused, encoders.folder) if target == "cuda" else encoders.fused

    def refuse_release(self, target: str, triton: str) -> None:
        if target == "tensorrt":
            refuse_release(triton)

    def without_half(self, operators: Collection[str], precision: str, target: str, triton: str) -> Collection[str]:
        return without_kernel(operators, precision, triton) if target == "cuda" else ()
