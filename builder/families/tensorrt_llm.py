"""Models that TensorRT-LLM runs: the checkpoint is handed to the Triton model that its container carries."""

from __future__ import annotations

from pathlib import Path

import yaml

from builder.checkpoint import CheckpointFiles
from builder.engines.tensorrt_llm import DTYPES, INPUTS, MODEL_FILE, NAME, OUTPUTS, model_document
from builder.families import Prepared, Stage
from builder.repository.layout import RUNTIME, RUNTIME_FILES, Config, RepositoryEntry
from builder.repository.placement import InstanceGroup
from builder.spec import BuildSpec
from builder.whole_checkpoint import place_checkpoint, refuse_options, unverified


def prepare(spec: BuildSpec, checkpoint: CheckpointFiles, folder: Path, stage: Stage) -> Prepared:
    """The one entry that runs in the trtllm container. Raises SpecError."""
    refuse_options(spec, checkpoint, DTYPES)
    with stage("lay out"):
        model, files = place_checkpoint(spec, spec.tensorrt_llm.models_folder, checkpoint)
        document = model_document(spec, model, checkpoint.revision)
        files[f"1/{MODEL_FILE}"] = yaml.safe_dump(document, sort_keys=False).encode()
        files["1/model.py"] = RUNTIME / RUNTIME_FILES[NAME]["model.py"]
        config = Config(
            name=spec.entry_name,
            backend="python",
            max_batch_size=0,  # TensorRT-LLM batches by itself
            inputs=INPUTS,
            outputs=OUTPUTS,
            groups=(InstanceGroup(1),),  # as in its template: where it runs is TensorRT-LLM's to say
            serving=spec.serving,
            dynamic_batching=False,
            decoupled=True,
            parameters=dict(sorted(spec.serving.metadata.items())),
        )
        entry = RepositoryEntry(spec.entry_name, config, files)
    return Prepared([entry], unverified(spec, checkpoint, f"{DTYPES[spec.precision]} TensorRT-LLM", entry))
