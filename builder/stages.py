"""The product in one function: a checkpoint becomes a verified, published model repository."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from builder.checkpoint import CheckpointFiles, locate, resolve
from builder.errors import RepositoryError
from builder.families import Stage, prepare
from builder.page import PAGE, page
from builder.report import BuildReport
from builder.repository.publish import existing_source, publish, recover
from builder.spec import BuildSpec


def build(spec: BuildSpec, stage: Stage = lambda name: nullcontext()) -> BuildReport:
    """Build `spec` and publish it in `spec.output`.

    `stage` is a context manager that is entered with the name of each stage, to show progress.
    Raises BuilderError; the repository is then as it was before.
    """
    recover(spec.output)
    with tempfile.TemporaryDirectory(prefix="build-repo-") as place:
        with stage("resolve"):
            checkpoint = locate(spec, weights=False) if spec.runs_checkpoint else resolve(spec)
            _refuse_another_checkpoint(spec, checkpoint)
        prepared = prepare(spec, checkpoint, Path(place), stage)
        with stage("publish"):
            front, *engines = prepared.entries
            front = replace(front, files={**front.files, PAGE: page(prepared.report).encode()})
            publish(spec.output, [*engines, front], prepared.report.document())
    return prepared.report


def _refuse_another_checkpoint(spec: BuildSpec, checkpoint: CheckpointFiles) -> None:
    for name in (spec.entry_name, f"{spec.entry_name}_model"):
        source = existing_source(spec.output, name)
        if source is not None and source != checkpoint.source:
            raise RepositoryError(
                f"{spec.output} already has a model {name}, built from {source}; this one is built from "
                f"{checkpoint.source}. Give it another name with --name, or remove that folder first"
            )
