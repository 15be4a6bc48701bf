"""Models that vLLM runs: the checkpoint is handed to Triton's vLLM backend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from builder.building.families.whole_checkpoint import front, place_checkpoint, unverified
from builder.checkpoints.checkpoint import CheckpointFiles
from builder.engines.placement import InstanceGroup
from builder.engines.vllm import BACKEND, DTYPES, INPUTS, MODEL_FILE, OUTPUTS, engine_arguments
from builder.options import VLLM, LayoutOptions, WholeCheckpoint
from builder.repository.verdict import Unverified


def hand_over(
    options: LayoutOptions, vllm: VLLM, whole: WholeCheckpoint, checkpoint: CheckpointFiles, about: Mapping[str, Any]
) -> Unverified:
    """Return the one entry that Triton's vLLM backend runs. Raises SpecError.

    `about`: what its report begins with.
    """
    model, files = place_checkpoint(options.name, vllm.models_folder, checkpoint)
    arguments = engine_arguments(vllm, whole, model, checkpoint.revision)
    files[f"1/{MODEL_FILE}"] = json.dumps(arguments, indent=1).encode()
    group = InstanceGroup(1, "KIND_MODEL")  # vLLM chooses the devices
    entry = front(options.name, BACKEND, group, (INPUTS, OUTPUTS), options.serving, files)
    return unverified(about, BACKEND, checkpoint, f"{DTYPES[whole.precision]} vLLM", entry)
