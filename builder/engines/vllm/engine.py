"""vLLM as an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from builder.engines import CheckpointEngine
from builder.engines.placement import InstanceGroup
from builder.engines.vllm import BACKEND, DTYPES, INPUTS, MODEL_FILE, OUTPUTS, engine_arguments
from builder.options import VLLM, WholeCheckpoint


class Vllm(CheckpointEngine):
    backend = BACKEND
    group: ClassVar = InstanceGroup(1, "KIND_MODEL")  # vLLM chooses the devices
    dtypes: ClassVar = DTYPES
    inputs: ClassVar = INPUTS
    outputs: ClassVar = OUTPUTS

    def files(self, options: VLLM, whole: WholeCheckpoint, model: str, revision: str | None) -> dict[str, bytes | Path]:
        arguments = engine_arguments(options, whole, model, revision)
        return {f"1/{MODEL_FILE}": json.dumps(arguments, indent=1).encode()}


ENGINE = Vllm()
