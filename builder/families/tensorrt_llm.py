"""Models that TensorRT-LLM runs: the checkpoint is handed to the Triton model that its container carries."""

from __future__ import annotations

import yaml

from builder.checkpoint.resolve import CheckpointFiles
from builder.checkpoint.whole import front, place_checkpoint, refuse_options, unverified
from builder.engines.tensorrt_llm import DTYPES, INPUTS, MODEL_FILE, NAME, OUTPUTS, model_document
from builder.families import built_from
from builder.spec import BuildSpec
from builder.triton.emitted import RUNTIME, RUNTIME_FILES
from builder.triton.placement import InstanceGroup
from builder.verify.verdict import Unverified


def hand_over(spec: BuildSpec, checkpoint: CheckpointFiles) -> Unverified:
    """The one entry that runs in the trtllm container. Raises SpecError."""
    refuse_options(spec, checkpoint, DTYPES)
    model, files = place_checkpoint(spec.entry_name, spec.tensorrt_llm.models_folder, checkpoint)
    document = model_document(spec.tensorrt_llm, spec.whole_checkpoint, model, checkpoint.revision)
    files[f"1/{MODEL_FILE}"] = yaml.safe_dump(document, sort_keys=False).encode()
    files["1/model.py"] = RUNTIME / RUNTIME_FILES[NAME]["model.py"]
    group = InstanceGroup(1)  # as in its template: where it runs is TensorRT-LLM's to say
    entry = front(spec.entry_name, "python", group, (INPUTS, OUTPUTS), spec.serving, files)
    about, name = built_from(spec, checkpoint), f"{DTYPES[spec.precision]} TensorRT-LLM"
    return unverified(about, str(spec.engine), checkpoint, name, entry)
