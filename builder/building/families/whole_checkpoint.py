"""Models of the engines that run a checkpoint as it is (vLLM, TensorRT-LLM): nothing is exported or measured.

For models that are too large for one GPU, or for this machine: their weights are never loaded here.
"""

from __future__ import annotations

from pathlib import Path

from builder.building.families import built_from, given_options
from builder.checkpoints.checkpoint import CheckpointFiles
from builder.common.errors import SpecError
from builder.engines import CheckpointEngine, checkpoint_engine
from builder.options import BuildSpec
from builder.repository.config.entries import Config, RepositoryEntry
from builder.repository.report.record import BuildReport, MeasuredVariant, file_hashes
from builder.repository.verdict import Unverified

TASK = "text-generation"


def hand_over(spec: BuildSpec, checkpoint: CheckpointFiles) -> Unverified:
    """Return the entry of an engine that runs the whole checkpoint, with unverified answers. Raises SpecError."""
    engine = checkpoint_engine(str(spec.engine))
    _refuse_options(spec, checkpoint, engine)
    entry = _entry(spec, checkpoint, engine)
    name = f"{engine.dtypes[spec.precision]} {engine.facts.title}"
    measured = MeasuredVariant(name, sum(file.stat().st_size for file in checkpoint.weights), {})
    report = BuildReport(
        **built_from(spec, checkpoint),
        attention={"fused": 0, "layers": 0},
        operators={},
        quantised=None,
        variants=(measured,),
        metric=checkpoint.task.metric,
        threshold=0.0,
        samples=0,
        padding=0.0,
        warnings=(
            f"nothing was run: {engine.name} serves the checkpoint as it is; its answers were compared with nothing",
        ),
        files=file_hashes([entry]),
        chosen=measured.name,
        engine=engine.name,
    )
    return Unverified((entry,), report)


def _refuse_options(spec: BuildSpec, checkpoint: CheckpointFiles, engine: CheckpointEngine) -> None:
    """Raise SpecError for a task or an option that an engine which runs the whole checkpoint does not have."""
    flag = f"--engine {spec.engine}"
    if checkpoint.task.name != TASK:
        raise SpecError(f"{flag} serves {TASK}; this checkpoint is for {checkpoint.task.name} (--task)")
    if spec.precision not in engine.dtypes:
        raise SpecError(
            f"{flag} has {', '.join(engine.dtypes)}, not --precision {spec.precision}; a quantised checkpoint is read "
            "as it is: leave --precision out"
        )
    of_graphs = (
        "--prune",
        "--graph",
        "--level",
        "--samples",
        "--draft",
        "--quality",
        "--budget",
        "--beams",
        "--max-answer",
        "serving.dynamo",
    )
    of_loops = (
        "--cache",
        "--cache-gb",
        "--adapters",
        "--executor",
        f"--instances (use {engine.section}.tensor_parallel_size)",
    )
    unusable = given_options(spec, *of_graphs, *of_loops, "--truncate", "--pooling", "--late-chunking")
    if unusable:
        raise SpecError(f"{', '.join(unusable)} cannot be used with {flag}, which runs the checkpoint as it is")


def _entry(spec: BuildSpec, checkpoint: CheckpointFiles, engine: CheckpointEngine) -> RepositoryEntry:
    """Return the one model of the repository, which streams; its engine batches by itself. Raises SpecError.

    With max_batch_size 0 the backends of vLLM and TensorRT-LLM accept a dynamic batcher: both are Python models, whose
    auto_complete_config sets only max_batch_size and decoupled, and whose execute starts each request by itself.
    """
    name, options = spec.entry_name, getattr(spec, engine.section)
    model, files = _placed(name, options.models_folder, checkpoint)
    files.update(engine.files(options, spec.whole_checkpoint, model, checkpoint.revision))
    config = Config(
        name=name,
        backend=engine.backend,
        max_batch_size=0,
        inputs=engine.inputs,
        outputs=engine.outputs,
        groups=(engine.group,),
        serving=spec.serving,
        dynamic_batching=True,  # a queue, no batches: docs/explanation/failures.md, "Bursts of requests"
        decoupled=True,
        parameters=dict(sorted(spec.serving.metadata.items())),
    )
    return RepositoryEntry(name, config, files)


def _placed(name: str, models_folder: str, checkpoint: CheckpointFiles) -> tuple[str, dict[str, bytes | Path]]:
    """Return the path where the engine finds the checkpoint, and the files copied for that from a local folder."""
    if checkpoint.revision is not None:  # a Hub id and its commit identify the weights; a local folder does not
        return checkpoint.source, {}
    copied = (".json", ".safetensors", ".txt", ".model", ".jinja")
    files: dict[str, bytes | Path] = {
        f"1/checkpoint/{file.name}": file for file in sorted(checkpoint.folder.iterdir()) if file.suffix in copied
    }
    return f"{models_folder.rstrip('/')}/{name}/1/checkpoint", files
