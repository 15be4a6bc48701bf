"""Models that TensorRT-LLM runs: the checkpoint is handed to the Triton model that its container carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from builder.building.families.whole_checkpoint import front, place_checkpoint, unverified
from builder.checkpoints.checkpoint import CheckpointFiles
from builder.common.folders import RUNTIME
from builder.engines.placement import InstanceGroup
from builder.engines.tensorrt_llm import DTYPES, INPUTS, MODEL_FILE, NAME, OUTPUTS, model_document
from builder.options import LayoutOptions, TensorRTLLM, WholeCheckpoint
from builder.repository.verdict import Unverified


def hand_over(
    options: LayoutOptions,
    tensorrt_llm: TensorRTLLM,
    whole: WholeCheckpoint,
    checkpoint: CheckpointFiles,
    about: Mapping[str, Any],
) -> Unverified:
    """Return the one entry that runs in the trtllm container. Raises SpecError.

    `about`: what its report begins with.
    """
    model, files = place_checkpoint(options.name, tensorrt_llm.models_folder, checkpoint)
    document = model_document(tensorrt_llm, whole, model, checkpoint.revision)
    files[f"1/{MODEL_FILE}"] = yaml.safe_dump(document, sort_keys=False).encode()
    files["1/model.py"] = RUNTIME / "tensorrt_llm_model.py"
    group = InstanceGroup(1)  # as in its template: TensorRT-LLM chooses the devices
    entry = front(options.name, "python", group, (INPUTS, OUTPUTS), options.serving, files)
    return unverified(about, NAME, checkpoint, f"{DTYPES[whole.precision]} TensorRT-LLM", entry)
