"""Decoders: one graph for prefill and decoding over a cache, run by the emitted decode loop.

A decoder is built for one engine (one_engine.py), or for each that this machine can measure, of which one is chosen
(fastest_engine.py). One with a draft is two decoders that are built one after the other (drafted.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from builder.building.families import Family, given_options
from builder.building.families.decoder.drafted import load_hidden_states_draft, refuse_draft
from builder.building.families.decoder.fastest_engine import FastestEngine, PerEngine, run_each
from builder.building.families.decoder.one_engine import Decoder, refuse_search
from builder.building.families.generating import read_samples, refuse_options
from builder.checkpoints.chat_template import chat_template
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.drafts.loading import HiddenStatesDraft
from builder.checkpoints.generation_config import generation_file, refuse_unserved
from builder.checkpoints.tokenizer import refuse_other_text
from builder.common.errors import CheckpointError, SpecError
from builder.common.memory import bias_bytes, largest_call, refuse_slots, weights_bytes
from builder.common.progress import Stage
from builder.engines.decoding import DecodingEngine, engine_of, measurable
from builder.graphs.export.architectures import bias_heads
from builder.graphs.export.decoder import cache_shapes
from builder.graphs.export.lora import AdapterCapacity
from builder.graphs.export.states import decays_by_key
from builder.options import BuildSpec

ANSWER = 32  # tokens left for an answer to the longest sample
MIN_SAMPLE_TOKENS = 3  # tokens of a sample


def begin(spec: BuildSpec, checkpoint: Checkpoint, folder: Path, stage: Stage) -> Family:
    """Return the stages of a decoder.

    Raises SpecError and CheckpointError for options and checkpoints that can be refused before the export.
    """
    refuse_options(spec, given_options(spec, "--max-answer (use --max-length)"), "a decoder")
    refuse_draft(spec)
    file = generation_file(checkpoint.folder)
    refuse_unserved(checkpoint.model.generation_config, is_decoder=True, file=file)
    refuse_search(spec, checkpoint)
    chat_template(checkpoint.tokenizer)  # raises for one that cannot be served
    refuse_other_text(checkpoint.tokenizer)
    draft = load_hidden_states_draft(spec, checkpoint)
    with stage("plan memory"):
        if spec.engine != "auto":
            return _on_one(engine_of(spec), checkpoint, folder, draft)
        engines = {name: engine_of(spec.model_copy(update={"engine": name})) for name in measurable()}
        for name in engines:
            (folder / name).mkdir()  # for its graphs
        decoders = run_each(
            PerEngine(engines), lambda name, engine: _on_one(engine, checkpoint, folder / name), (SpecError,)
        )
        return FastestEngine(decoders.by_engine, decoders.refused)


def _on_one(
    engine: DecodingEngine, checkpoint: Checkpoint, folder: Path, draft: HiddenStatesDraft | None = None
) -> Decoder:
    engine.refuse()
    engine.refuse_adapters()
    layers, weights = cache_shapes(checkpoint.model), weights_bytes(checkpoint.model)
    engine.refuse_states(layers, decays_by_key(checkpoint.model))
    engine = engine.sized(layers, weights, checkpoint.max_length, checkpoint.config)
    spec = engine.spec
    refuse_search(spec, checkpoint)
    memory = engine.plan_memory(layers, weights, checkpoint.max_length)
    tokens, heads = largest_call(spec.prefill_tokens, spec.slots), bias_heads(checkpoint.model)
    if heads and not engine.paged:
        memory = replace(memory, bias=bias_bytes(heads, tokens, checkpoint.max_length))
        refuse_slots(
            memory.cache + memory.bias,
            spec.usable_memory,
            "the cache and the bias on positions need",
            f"{spec.slots} slots of {checkpoint.max_length} tokens, and {tokens} tokens of a call in {heads} heads",
            "serving.prefill_tokens, --slots or --max-length",
        )
    if spec.adapters:
        memory = replace(memory, adapters=AdapterCapacity.of(spec).bytes(checkpoint.model))
        adapters = f"{spec.adapters} adapters of rank {spec.adapter_rank}"
        refuse_slots(
            memory.cache + memory.adapters,
            spec.usable_memory,
            "the cache and the adapters need",
            f"{spec.slots} slots of {checkpoint.max_length} tokens, and {adapters}",
            "--adapters, --adapter-rank or --slots",
        )
    rows = tuple(map(tuple, sample_rows(spec.samples, checkpoint)))
    return Decoder(spec, checkpoint, folder, engine, memory, layers, rows, draft)


def sample_rows(path: Path | None, checkpoint: Checkpoint) -> list[list[int]]:
    """Return the samples as token rows. Raises SpecError, or CheckpointError if none is left."""
    longest = checkpoint.max_length - ANSWER
    if longest < MIN_SAMPLE_TOKENS:
        raise CheckpointError(
            f"a build compares answers of {ANSWER} tokens to texts of at least {MIN_SAMPLE_TOKENS}, and this model "
            f"takes {checkpoint.max_length} tokens: raise --max-length to {ANSWER + MIN_SAMPLE_TOKENS}, if the model "
            "has the positions"
        )
    samples = read_samples(path, checkpoint, checkpoint.task.fields({})[0])
    texts = [str(sample["text_input"]) for sample in samples]
    rows = [checkpoint.tokenizer(text)["input_ids"][:longest] for text in texts]
    rows = [row for row in rows if len(row) >= MIN_SAMPLE_TOKENS]
    if not rows:
        raise CheckpointError("no sample has more than two tokens; give texts with --samples, as text_input")
    return rows
