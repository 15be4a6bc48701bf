"""Encoder-decoders: an encoder graph that ends in the decoder's keys and values, and a decoder step over caches."""

from __future__ import annotations

from pathlib import Path

from builder.building.families import given_options
from builder.building.families.generating import refuse_options
from builder.building.families.seq2seq.settings import read_settings, source_of, texts_to_judge
from builder.building.families.seq2seq.stages import Seq2Seq
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.tokenizer import refuse_other_text
from builder.common.memory import ReservedMemory, cache_bytes, refuse_slots, weights_bytes
from builder.common.progress import Stage
from builder.engines.onnxruntime import BACKEND
from builder.engines.onnxruntime.decoding import refuse_head_sizes
from builder.graphs.export.seq2seq import seq2seq_shapes
from builder.options import BuildSpec


def begin(spec: BuildSpec, checkpoint: Checkpoint, folder: Path, stage: Stage) -> Seq2Seq:
    """Return the stages of an encoder-decoder.

    Raises SpecError and CheckpointError for options and checkpoints that can be refused before the export.
    """
    unusable = given_options(
        spec,
        "--executor bls (its cross-attention cache would travel at each step)",
        f"--cache {spec.cache}",
        "--cache-gb",
        "--draft",
        "--adapters",
    )
    if spec.engine == "auto":
        unusable.append("--engine auto (it runs on one engine)")
    elif spec.target == "cpu" and spec.engine not in (None, BACKEND):
        unusable.append(f"--engine {spec.engine} (it has no cross-attention over a cache)")
    unusable += given_options(spec, f"--target {spec.target}", "serving.tool_parser")
    refuse_options(spec, unusable, "an encoder-decoder model")
    refuse_other_text(checkpoint.tokenizer)
    settings = read_settings(checkpoint, spec.task, spec.slots, spec.beams, spec.max_answer)
    with stage("plan memory"):
        own, cross = seq2seq_shapes(checkpoint.model)
        refuse_head_sizes((*own, *cross), "no engine here serves an encoder-decoder with others")
        cache = cache_bytes(own, spec.slots, settings.max_answer) + cache_bytes(
            cross, spec.slots, checkpoint.max_length
        )
        slots = f"{spec.slots} slots of {checkpoint.max_length} tokens read and {settings.max_answer} generated"
        refuse_slots(cache, spec.usable_memory, "the caches need", slots, "--slots, --max-length or --max-answer")
        memory = ReservedMemory(cache, weights_bytes(checkpoint.model))
    source = source_of(checkpoint, settings, cross, spec.serving.token_budget)
    return Seq2Seq(spec, checkpoint, folder, settings, source, memory, tuple(texts_to_judge(spec.samples, checkpoint)))
