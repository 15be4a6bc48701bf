"""Models that vLLM runs: the checkpoint is handed to Triton's vLLM backend."""

from __future__ import annotations

import json

from builder.checkpoint.resolve import CheckpointFiles
from builder.checkpoint.whole import front, place_checkpoint, refuse_options, unverified
from builder.engines.vllm import BACKEND, DTYPES, INPUTS, MODEL_FILE, OUTPUTS, engine_arguments
from builder.families import built_from
from builder.spec import BuildSpec
from builder.triton.placement import InstanceGroup
from builder.verify.verdict import Unverified


def hand_over(spec: BuildSpec, checkpoint: CheckpointFiles) -> Unverified:
    """The one entry that Triton's vLLM backend takes. Raises SpecError."""
    refuse_options(spec, checkpoint, DTYPES)
    model, files = place_checkpoint(spec.entry_name, spec.vllm.models_folder, checkpoint)
    arguments = engine_arguments(spec.vllm, spec.whole_checkpoint, model, checkpoint.revision)
    files[f"1/{MODEL_FILE}"] = json.dumps(arguments, indent=1).encode()
    group = InstanceGroup(1, "KIND_MODEL")  # where it runs is vLLM's to say
    entry = front(spec.entry_name, BACKEND, group, (INPUTS, OUTPUTS), spec.serving, files)
    about, name = built_from(spec, checkpoint), f"{DTYPES[spec.precision]} vLLM"
    return unverified(about, str(spec.engine), checkpoint, name, entry)
