"""TensorRT-LLM as an engine."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import yaml

from builder.common.folders import RUNTIME
from builder.engines import CheckpointEngine
from builder.engines.placement import InstanceGroup
from builder.engines.tensorrt_llm import DTYPES, INPUTS, MODEL_FILE, OUTPUTS, model_document
from builder.options import TensorRTLLM, WholeCheckpoint


class TensorRtLlm(CheckpointEngine):
    backend = "python"
    group: ClassVar = InstanceGroup(1)  # as in its template: TensorRT-LLM chooses the devices
    dtypes: ClassVar = DTYPES
    inputs: ClassVar = INPUTS
    outputs: ClassVar = OUTPUTS

    def files(
        self, options: TensorRTLLM, whole: WholeCheckpoint, model: str, revision: str | None
    ) -> dict[str, bytes | Path]:
        document = model_document(options, whole, model, revision)
        arguments = yaml.safe_dump(document, sort_keys=False).encode()
        return {f"1/{MODEL_FILE}": arguments, "1/model.py": RUNTIME / "tensorrt_llm_model.py"}


ENGINE = TensorRtLlm()
