"""Models that vLLM runs: nothing is exported or measured, the checkpoint is handed to Triton's vLLM backend.

For models that are too large for one GPU, or for this machine: their weights are never loaded here.
"""

from __future__ import annotations

import json
from pathlib import Path

from builder.checkpoint import CheckpointFiles
from builder.engines.vllm import BACKEND, DTYPES, INPUTS, MODEL_FILE, OUTPUTS, engine_arguments
from builder.errors import SpecError
from builder.families import Prepared, Stage, built_from
from builder.report import BuildReport, Rung, file_hashes
from builder.repository.layout import Config, RepositoryEntry
from builder.repository.placement import InstanceGroup
from builder.spec import BuildSpec

TASK = "text-generation"


def prepare(spec: BuildSpec, checkpoint: CheckpointFiles, folder: Path, stage: Stage) -> Prepared:
    """The one entry that Triton's vLLM backend takes. Raises SpecError."""
    _refuse_options(spec, checkpoint)
    with stage("lay out"):
        place = f"{spec.vllm.models_folder.rstrip('/')}/{spec.entry_name}/1/checkpoint"
        copied = checkpoint.revision is None  # a Hub id and its commit name the weights; a folder here names nothing
        arguments = engine_arguments(spec, place if copied else checkpoint.source, checkpoint.revision)
        files: dict[str, bytes | Path] = {f"1/{MODEL_FILE}": json.dumps(arguments, indent=1).encode()}
        if copied:
            for file in sorted(checkpoint.folder.iterdir()):
                if file.suffix in (".json", ".safetensors", ".txt", ".model", ".jinja"):
                    files[f"1/checkpoint/{file.name}"] = file
        config = Config(
            name=spec.entry_name,
            backend=BACKEND,
            max_batch_size=0,  # vLLM batches by itself
            inputs=INPUTS,
            outputs=OUTPUTS,
            groups=(InstanceGroup(1, "KIND_MODEL"),),  # where it runs is vLLM's to say
            serving=spec.serving,
            dynamic_batching=False,
            decoupled=True,
            parameters=dict(sorted(spec.serving.metadata.items())),
        )
        entry = RepositoryEntry(spec.entry_name, config, files)
    size = sum(file.stat().st_size for file in checkpoint.weights)
    rung = Rung(f"{DTYPES[spec.precision]} vLLM", size, {})
    return Prepared([entry], _report(spec, checkpoint, rung, entry))


def _refuse_options(spec: BuildSpec, checkpoint: CheckpointFiles) -> None:
    if checkpoint.task.name != TASK:
        raise SpecError(f"--engine vllm serves {TASK}; this checkpoint is for {checkpoint.task.name} (--task)")
    if spec.precision not in DTYPES:
        raise SpecError(
            f"--engine vllm has {', '.join(DTYPES)}, not --precision {spec.precision}; a quantised checkpoint needs "
            "none: vLLM reads what it is"
        )
    given = {
        "--prune": spec.prune is not None,
        "--graph": spec.graph is not None,
        "--level": spec.level != "O2",
        "--samples": spec.samples is not None,
        "--quality": spec.quality is not None,
        "--beams": spec.beams is not None,
        "--max-answer": spec.max_answer is not None,
        "--cache (use vllm.arguments kv_cache_dtype)": spec.cache != "fp32",
        "--executor": spec.executor != "in-process",
        "--instances (use vllm.tensor_parallel_size)": spec.instances > 1,
        "--truncate": spec.truncate,
        "--pooling": spec.pooling is not None,
    }
    unusable = [name for name, used in given.items() if used]
    if unusable:
        raise SpecError(f"{', '.join(unusable)}: not of --engine vllm, which runs the checkpoint as it is")


def _report(spec: BuildSpec, checkpoint: CheckpointFiles, rung: Rung, entry: RepositoryEntry) -> BuildReport:
    return BuildReport(
        **built_from(spec, checkpoint),
        attention={"fused": 0, "layers": 0},
        operators={},
        quantised=None,
        ladder=(rung,),
        metric=checkpoint.task.metric,
        threshold=0.0,
        samples=0,
        padding=0.0,
        warnings=("nothing was run: vLLM serves the checkpoint as it is, and its answers were compared with nothing",),
        files=file_hashes([entry]),
        chosen=rung.name,
        engine=BACKEND,
    )
