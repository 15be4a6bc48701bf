"""Encoders: one graph, one call a batch, and a search over variants of it."""

from __future__ import annotations

from pathlib import Path

from builder.building.families.encoder.stages import Encoder
from builder.building.variants.candidates import requested_variants
from builder.checkpoints.checkpoint import Checkpoint
from builder.common.cpu import cpu
from builder.common.errors import CheckpointError, SpecError
from builder.common.progress import Stage
from builder.options import BuildSpec


def begin(spec: BuildSpec, checkpoint: Checkpoint, folder: Path, stage: Stage) -> Encoder:
    """Return the stages of an encoder.

    Raises SpecError for an option that encoders do not have, CheckpointError for a model of several parts or of bytes.
    """
    generating = {
        "--beams": spec.beams,
        "--max-answer": spec.max_answer,
        "--cache-gb": spec.cache_gb,
        "--draft": spec.draft,
        "serving.tool_parser": spec.serving.tool_parser,
        "serving.batch_dimension": spec.serving.batch_dimension or None,
    }
    given = [name for name, value in generating.items() if value is not None]
    if given:
        raise SpecError(f"{given[0]} is for models that generate; {checkpoint.task.name} does not")
    refuse_without_process(spec)
    _refuse_composed(checkpoint)
    return Encoder(spec, checkpoint, folder, tuple(requested_variants(spec, cpu()["flags"])))


def refuse_without_process(spec: BuildSpec) -> None:
    """Raise SpecError for an option that an engine in the front's own process does not have."""
    if not spec.in_process:
        if spec.executor == "in-process" and "executor" in spec.model_fields_set:
            raise SpecError("on a GPU an encoder's engine is a Triton model of its own: leave --executor out")
        return
    if spec.serving.front_instances not in (None, spec.instances):
        raise SpecError(
            "serving.front_instances: in process each front has an engine of its own, so --instances sets both; "
            "leave it out, or use --executor bls"
        )
    if spec.serving.optimization_level:
        raise SpecError("serving.optimization_level is for Triton's own backends: leave it out, or use --executor bls")


def _refuse_composed(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a model of several parts or of bytes: its configuration has no layers or no tokens."""
    missing = [name for name in ("num_hidden_layers", "vocab_size") if not hasattr(checkpoint.config, name)]
    if missing:
        raise CheckpointError(
            f"{checkpoint.config.model_type} cannot be served for {checkpoint.task.name}: its config.json has no "
            f"{missing[0]}. Models of several parts (an image or audio encoder beside the text's) and models of bytes "
            "are not supported; a checkpoint of the text part alone may be"
        )
