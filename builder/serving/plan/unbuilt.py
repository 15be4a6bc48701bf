"""Compute the needs of an unbuilt model from its checkpoint's config: the shapes of its weights and cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from builder.building.families.decoder.drafted import draft_spec, memory_of_draft, naming_draft
from builder.building.families.generating import not_as_stored
from builder.building.families.seq2seq.settings import read_settings
from builder.checkpoints.activations import DecodingStep, layer_numbers
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.drafts.loading import describe_draft
from builder.checkpoints.resolve import describe
from builder.common.errors import SpecError
from builder.common.memory import (
    BYTES_PER_VALUE,
    BYTES_PER_WEIGHT,
    bias_bytes,
    cache_bytes,
    conversion_bytes,
    encoder_call,
)
from builder.engines import session_engine
from builder.engines.decoding import DecodingEngine, engine_of, measurable
from builder.graphs.export.architectures import bias_heads
from builder.graphs.export.decoder import cache_shapes
from builder.graphs.export.lora import AdapterCapacity
from builder.graphs.export.seq2seq import seq2seq_shapes
from builder.graphs.export.states import decays_by_key
from builder.options import BuildSpec
from builder.runtime.contract import LayerShape
from builder.serving.plan.needs import ModelNeeds

CACHE_SIZES = ("slots", "cache_gb")
FP32 = BYTES_PER_VALUE["float32"]
NOT_MEASURED = "not measured: build it, then plan again"
NOT_MEASURED_ON_CARD = "not measured on this card: throughput is left out (build-repo load-test measures it)"


def needs_of_checkpoint(spec: BuildSpec) -> ModelNeeds:
    """Return the needs of a model that was not built. Raises CheckpointError, ExportError and SpecError.

    Loads no weights: the tensors have shapes and no memory.
    """
    checkpoint = describe(spec.source)
    weights = sum(parameter.numel() for parameter in checkpoint.model.parameters())
    size = round(weights * BYTES_PER_WEIGHT.get(spec.precision, 4.0))
    length, family = checkpoint.max_length, checkpoint.family
    measured = "; ".join(filter(None, [NOT_MEASURED, not_as_stored(spec.precision, checkpoint)]))
    if family in ("encoder", "static"):
        token = _encoder_token(checkpoint.model, length, FP32) if family == "encoder" else 0
        size += AdapterCapacity.of(spec).bytes(checkpoint.model) if spec.adapters else 0
        return ModelNeeds("encoder", size, length, measured=measured, call_token=token)
    with torch.device("meta"):
        if family == "decoder":
            layers = cache_shapes(checkpoint.model)
            size += AdapterCapacity.of(spec).bytes(checkpoint.model) if spec.adapters else 0
            engine = _engine(spec, layers, checkpoint.model)
            cache, paged = engine.cache_type, engine.paged
            draft = 0 if spec.draft is None else _bytes(spec, checkpoint)
            needs = ModelNeeds("generation", size, length, layers, cache=cache, paged=paged, measured=measured)
            bias = 0 if paged else bias_bytes(bias_heads(checkpoint.model), 1, 1)
            return replace(needs, engine=session_engine(engine.session()).name, draft=draft, bias=bias)
        own, cross = seq2seq_shapes(checkpoint.model)
    answer = read_settings(checkpoint, spec.task, spec.slots, spec.beams, spec.max_answer).max_answer
    return ModelNeeds("generation", size, answer, own, cross, source=length, measured=measured)


def on_gpu(spec: BuildSpec, needs: ModelNeeds) -> ModelNeeds:
    """Return `needs` with the activations of a call on a card, and without speeds, which were measured on a CPU.

    Raises CheckpointError, and SpecError for encoder-decoders and for what the engine of a decoder refuses.
    """
    if needs.cross:
        raise SpecError(f"{spec.entry_name}: encoder-decoders run on the CPU alone: leave --target out")
    model = describe(spec.source).model
    width = FP32 if spec.precision == "fp32" else FP32 // 2
    if needs.kind == "encoder":
        tokens = encoder_call(spec.serving.token_budget, needs.length)
        of_token = _encoder_token(model, needs.length, width)
        size, formula = tokens * of_token, f"{tokens} tokens of a call x {of_token} bytes"
    else:
        weights = round(needs.weights / BYTES_PER_WEIGHT.get(spec.precision, 4.0) * 4)
        engine = _engine(spec, needs.layers, model)
        chosen = engine.sized(needs.layers, weights, needs.length, model.config).spec
        changed = {name: getattr(chosen, name) for name in CACHE_SIZES if getattr(chosen, name) != getattr(spec, name)}
        needs = replace(needs, sized=changed)
        step = DecodingStep.of(model.config, chosen.prefill_tokens, chosen.slots, width)
        size, formula = step.bytes, step.formula
    return replace(needs, latency=None, measured=NOT_MEASURED_ON_CARD, faster="", activations=size, activated=formula)


def _encoder_token(model: PreTrainedModel, length: int, width: int) -> int:
    """Return the bytes that an encoder computes for a token of a call of texts of `length` tokens.

    The attention scores are counted twice and, if it predicts words, those of all words once.
    """
    config = model.config.get_text_config()
    scores = 2 * getattr(config, "num_attention_heads", 0) * length * width  # FNet has no attention
    words = config.vocab_size * FP32 if type(model).__name__.endswith("ForMaskedLM") else 0
    return layer_numbers(model.config) * width + scores + words


def _bytes(spec: BuildSpec, target: Checkpoint) -> int:
    """Return the bytes of --draft, its cache included, and of the hidden states of its target if it reads them."""
    own = draft_spec(spec, target.task.name, target.max_length)
    with naming_draft(own.model):
        layers = describe_draft(own.source, spec.source, target.model)
        if layers is not None:
            memory = memory_of_draft(spec, layers, target)
            return (
                memory.cache + memory.conversion + round(memory.weights / 4 * BYTES_PER_WEIGHT.get(spec.precision, 4.0))
            )
        needs = needs_of_checkpoint(own)
    cache = cache_bytes(needs.layers, own.slots, needs.length, BYTES_PER_VALUE[needs.cache])
    return needs.weights + cache + conversion_bytes(needs.layers, needs.cache, needs.length)


def _engine(spec: BuildSpec, layers: Sequence[LayerShape], model: PreTrainedModel) -> DecodingEngine:
    """Return the spec's engine; for `auto`, which the build decides, the first engine that supports the model.

    ONNX Runtime, whose slots are each as long as the longest text, takes more memory than blocks that several sequences
    share. Raises SpecError if no engine supports the model.
    """
    names = measurable() if spec.engine == "auto" else [spec.engine]
    refused: list[SpecError] = []
    for name in names:
        engine = engine_of(spec.model_copy(update={"engine": name}))
        try:
            engine.refuse()
            engine.refuse_adapters()
            engine.refuse_states(layers, decays_by_key(model))
        except SpecError as error:
            refused.append(error)
        else:
            return engine
    raise refused[0]
