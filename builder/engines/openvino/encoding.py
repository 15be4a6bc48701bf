"""OpenVINO for encoders, on the CPU."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from builder.common.machine import VNNI, cpu
from builder.engines.encoding import EncodingEngine, Variant
from builder.engines.openvino import BACKEND, BF16, MODEL_FILE, arithmetic_on, convert
from builder.engines.optimise import Quantised
from builder.graphs.onnx.graph import remove_graph


class OpenVinoEncoding(EncodingEngine):
    name = BACKEND
    titles: ClassVar = {"cpu": "OpenVINO"}
    prepares_shapes = True
    converts_to_half = True
    auto = ("fp32", "bf16", "int8-static", "int8-weights")
    variants = (
        Variant("fp32", BACKEND),
        Variant("bf16", BACKEND, BF16),  # ONNX Runtime has no bf16 on a CPU
        Variant("fp16", BACKEND),
        Variant("int8-static", BACKEND, VNNI),  # it reads dynamic int8 wrongly
        Variant("int8-weights", BACKEND, VNNI),
        Variant("int4-weights", BACKEND, VNNI),
    )

    def finish(self, quantised: Quantised, precision: str, path: Path) -> Quantised:
        """Convert the graph: real constants are halves except in fp32; products are in the CPU's fastest type.

        A requested fp32 or bf16 stays the arithmetic of the products. A graph that was written in the folder of `path`
        for this is removed.
        """
        arithmetic = precision if precision in ("fp32", "bf16") else arithmetic_on(cpu()["flags"])
        converted = convert(quantised.graph, path.parent / "ir" / MODEL_FILE, arithmetic, precision != "fp32")
        if path.parent in quantised.graph.path.parents:
            remove_graph(quantised.graph)
        return replace(quantised, graph=converted)

    def unable(self, precision: str, flags: Collection[str]) -> str | None:
        has = arithmetic_on(flags)
        if precision == "bf16" and has != "bf16":
            return (
                f"this CPU cannot multiply in bf16: it has none of {', '.join(BF16)}. Use --precision int8-static "
                "or fp32, or build on the machine that will serve"
            )
        if precision == "fp32" and has != "fp32":
            return (
                "on this CPU OpenVINO multiplies in bf16, and Triton's backend has no parameter for fp32: use "
                "--precision bf16, or --engine onnxruntime"
            )
        return None


ENCODING = OpenVinoEncoding()
