"""Load the checkpoint that a published model was built from, with the options of its build."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.resolve import resolve
from builder.checkpoints.tokenizer import truncating
from builder.common.errors import CheckpointError, RepositoryError
from builder.options import make_spec
from builder.repository.report.record import BuildReport
from builder.runtime.contract import ContractError, EncoderServing, GenerationServing, load


def checkpoint_of(report: BuildReport, serving: EncoderServing | GenerationServing, folder: Path | None) -> Checkpoint:
    """Return the checkpoint of a model; an encoder's tokenizer cuts texts where the served model does.

    `folder`: where it is, if it is not on the Hub. Raises CheckpointError for another one than the model's own.
    """
    if isinstance(serving, EncoderServing):
        longest = serving.max_length
    else:
        longest = serving.arena.length if serving.source is None else serving.source.max_length
    source, revision = report.checkpoint["source"], report.checkpoint.get("revision")
    model = str(folder or source)
    if folder is None and revision is None and not Path(source).is_dir():
        raise CheckpointError(f"{report.name} was built from a folder {source}, which is not here: --checkpoint FOLDER")
    spec = make_spec(
        model=model,
        revision=revision if folder is None else None,
        task=report.task,
        max_length=longest,
        pooling=report.checkpoint.get("pooling"),
    )
    checkpoint = resolve(spec)
    digest = report.checkpoint.get("weights_sha256")
    if digest is not None and checkpoint.weights_sha256 not in (None, digest):
        raise CheckpointError(
            f"{model} has other weights than {report.name} was built from ({source}); name its own with --checkpoint"
        )
    if isinstance(serving, EncoderServing):
        checkpoint = replace(checkpoint, tokenizer=truncating(checkpoint.tokenizer, longest))
    return checkpoint


def serving_of(repository: Path, report: BuildReport) -> EncoderServing | GenerationServing:
    """Return the settings of the version that is served. Raises RepositoryError."""
    version = repository / report.name / str(report.version)
    try:
        serving = load(version)
    except (ContractError, OSError) as error:
        raise RepositoryError(f"{version}: {error}") from error
    assert isinstance(serving, EncoderServing | GenerationServing)  # a front of one model
    return serving
