"""What the config of a checkpoint says of a model that was not built: the shapes of its weights and of its cache."""

from __future__ import annotations

import torch

from builder.checkpoint.resolve import describe
from builder.engines.decoding import engine_of
from builder.errors import SpecError
from builder.export.decoder import cache_shapes
from builder.export.seq2seq import seq2seq_shapes
from builder.families.seq2seq.settings import read_settings
from builder.plan.needs import Needs
from builder.spec import BuildSpec

# bytes of a weight; of 4 bits in blocks of 32 with a scale of 4 bytes, and the embeddings in 8
PACKED = {
    "fp16": 2.0,
    "bf16": 2.0,
    "int8": 1.0,
    "int8-static": 1.0,
    "fp8": 1.0,
    "int8-weights": 1.13,
    "int4-weights": 0.7,
}
NOT_MEASURED = "not measured: build it, then plan again"


def unbuilt(spec: BuildSpec) -> Needs:
    """Raises CheckpointError, ExportError and SpecError. No weight is loaded: tensors have shapes and no memory."""
    checkpoint = describe(spec.source)
    weights = sum(parameter.numel() for parameter in checkpoint.model.parameters())
    size = round(weights * PACKED.get(spec.precision, 4.0))
    length, family = checkpoint.max_length, checkpoint.task.family
    if family == "encoder":
        return Needs("encoder", size, length, measured=NOT_MEASURED)
    with torch.device("meta"):
        if family == "decoder":
            if spec.engine == "auto":
                raise SpecError(f"{spec.entry_name}: --engine auto is known once it was built; build it, or say which")
            layers, engine = cache_shapes(checkpoint.model), engine_of(spec)
            engine.refuse()
            cache, paged = engine.cache_type, engine.paged
            return Needs("generation", size, length, layers, cache=cache, paged=paged, measured=NOT_MEASURED)
        own, cross = seq2seq_shapes(checkpoint.model)
    answer = read_settings(checkpoint, spec.task, spec.slots, spec.beams, spec.max_answer).max_answer
    return Needs("generation", size, answer, own, cross, source=length, measured=NOT_MEASURED)
