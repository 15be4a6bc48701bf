"""TensorRT's plans of encoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from builder.common.progress import Stage
from builder.engines.encoding import Encoders, EncodingEngine, Variant
from builder.engines.tensorrt import BACKEND, refuse_release
from builder.engines.tensorrt.lowering import for_tensorrt
from builder.engines.tensorrt.recipe import recipe_files
from builder.graphs.onnx.graph import Graph
from builder.options import BuildSpec
from builder.runtime.contract import EncoderServing


class TensorRtEncoding(EncodingEngine):
    name = BACKEND
    titles: ClassVar = {"tensorrt": "TensorRT"}
    runs_rest_in_half = True  # ONNX Runtime's TensorRT allows one lower precision, which is int8
    variants = tuple(
        Variant(precision, BACKEND, target="tensorrt") for precision in ("fp32", "fp16", "bf16", "int8-static", "fp8")
    )

    def source(self, encoders: Encoders, target: str) -> Graph:
        return for_tensorrt(encoders.plain, encoders.folder)

    def files(
        self,
        graph: Graph,
        options: BuildSpec,
        serving: EncoderServing,
        feeds: Sequence[Mapping[str, np.ndarray]],
        folder: Path,
        stage: Stage,
    ) -> Mapping[str, bytes | Path]:
        """Return the recipe from which a GPU compiles the plan."""
        with stage("recipe"):
            return recipe_files(options, graph, serving, feeds, folder)

    def refuse_release(self, target: str, triton: str) -> None:
        refuse_release(triton)


ENCODING = TensorRtEncoding()
