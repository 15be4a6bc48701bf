"""Shared parts of the families that generate: samples, refusals, set-up of the decode loop, precisions and report.

Knows the specification, the checkpoint and the contract with the emitted loop; knows no engine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from builder.building.families import built_from, given_options
from builder.building.variants.generating import Required
from builder.building.verify.generation import TOLERANCE
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.generation_config import (
    end_ids,
    generation_file,
    known_token_rules,
    max_tokens,
    option_defaults,
)
from builder.checkpoints.text_part import other_inputs
from builder.checkpoints.tokenizer import cleans_up
from builder.common.errors import SpecError
from builder.common.memory import ReservedMemory, state_bytes
from builder.common.releases import runtime_has
from builder.common.samples import load_samples
from builder.common.speed import Latencies
from builder.engines import graph_engine
from builder.engines.optimise import Quantised
from builder.graphs.onnx.graph import Graph
from builder.graphs.onnx.operators import FUSED
from builder.options import BuildSpec
from builder.repository.config.entries import RepositoryEntry
from builder.repository.layout.encoder import request_limits
from builder.repository.report.record import BuildReport, MeasuredVariant, file_hashes
from builder.repository.verdict import ParityBound
from builder.runtime.contract import Arena, GenerationServing, LayerShape, Session
from builder.runtime.fields import Field
from builder.runtime.generation.executors.paged import OPERATOR as PAGED_ATTENTION
from builder.runtime.generation.executors.paged import PAGED_STATES

AUTO = ("int8", "int8-weights", "int4-weights")
PRECISIONS = ("fp32", *AUTO, "auto")
OPERATORS = (*FUSED, PAGED_ATTENTION, *PAGED_STATES)


def precisions(precision: str, triton: str, in_process: bool) -> tuple[str, ...]:
    """Return the precision of the weights, or those that are tried."""
    if precision != "auto":
        return (precision,)
    eight_bits = runtime_has("MatMulNBits with 8 bits", triton, in_process)
    return ("fp32", *(one for one in AUTO if one != "int8-weights" or eight_bits))


def refuse_options(spec: BuildSpec, family_options: Sequence[str], family: str) -> None:
    """Raise SpecError, with the names, for options that a generating model does not have: none is ignored.

    `family_options`: further options that are given and that this family refuses.
    """
    unusable = given_options(
        spec,
        "--pooling",
        "--late-chunking",
        "--adapter-labels",
        "--truncate",
        "--instances (use --slots)",
        "--max-queue-delay-us",
    )
    if spec.target == "cpu" and spec.precision not in PRECISIONS:
        unusable.append(f"--precision {spec.precision} (it has {', '.join(PRECISIONS)})")
    unusable += [*given_options(spec, "--level", "--prune", "--graph", "--budget"), *family_options]
    unusable += given_options(
        spec,
        "serving.queue.timeout_action DELAY",
        "serving.queue.allow_timeout_override (requests may always send a timeout)",
        "serving.response_cache",
        "serving.dynamo",
        "serving.preferred_batch_sizes",
        "serving.priority_levels",
    )
    if unusable:
        raise SpecError(f"{', '.join(unusable)}: {family} does not have that; build without it")


def read_samples(path: Path | None, checkpoint: Checkpoint, inputs: Sequence[Field]) -> list[Mapping[str, Any]]:
    """Return the samples that have a text; the user's own, in `path`, are read with `inputs`. Raises SpecError."""
    task = checkpoint.task
    samples: Sequence[Mapping[str, Any]] = task.samples
    if path is not None:
        samples = load_samples(path, inputs, task.labels)
    return [sample for sample in samples if sample.get("text_input")]


def vocabulary_of(model: PreTrainedModel) -> int:
    """Return the number of logits of a position: as many as the tokeniser has tokens, or more."""
    return int(model.get_output_embeddings().weight.shape[0])


def measured_pytorch(memory: ReservedMemory, latency: Latencies, perplexity: float) -> MeasuredVariant:
    """Return PyTorch as a measured variant: its error is 0 and its agreement is 1."""
    return MeasuredVariant("PyTorch fp32", memory.weights, latency, 0.0, 1.0, 1.0, 1.0, perplexity)


def not_as_stored(precision: str, checkpoint: Checkpoint) -> str | None:
    """Return a remark for weights of a few bits that are served in more, or rounded again; None for others."""
    stored = checkpoint.grids
    if stored is None or stored.scattered or precision in ("auto", *stored.precisions):
        return None
    if precision == "int8" and stored.bits == 4:
        return None  # chosen for its activations
    return f"{stored.described}: --precision {' or '.join(stored.precisions)} serves them as they are"


def rounded_experts(parts: Sequence[Quantised]) -> str | None:
    """Return a remark for mixtures of experts without the checkpoint's codes, where those are served."""
    count = sum(part.rounded_experts for part in parts)
    if not count:
        return None
    return (
        f"{count} mixtures of experts were rounded to 8 bits: the checkpoint has some of their experts in real "
        "numbers, or in groups or with zero points that the operator does not take"
    )


def limits_of_states(layers: Sequence[LayerShape]) -> str | None:
    """Return a remark for a model whose layers keep states; None for others."""
    count, kept = sum(bool(layer.states) for layer in layers), state_bytes(layers)
    if not count:
        return None
    return (
        f"{count} of {len(layers)} layers keep a state of fixed size ({kept / 1e6:.3g} MB a sequence), which cannot go "
        "back: no tokens are guessed by prompt lookup, and a prompt reuses the cache of another only if it continues it"
    )


def inputs_left_out(checkpoint: Checkpoint) -> str | None:
    """Return a remark for a model that reads images or audio too, of which the part for text is served."""
    names = other_inputs(checkpoint.config)
    if not names:
        return None
    return (
        f"the model's part for text is served: it also reads {', '.join(names)}, which is left out and refused in chats"
    )


def parity_bounds(
    required: Required, exact: MeasuredVariant, served: MeasuredVariant, pytorch: MeasuredVariant, metric: str
) -> tuple[ParityBound, ...]:
    """Return the bounds on the graph in fp32 and, if that is not the served variant, on what quantising kept."""
    error = math.inf if exact.error is None else exact.error
    bound = ParityBound("the error of log-probabilities in fp32", error, at_most=TOLERANCE)
    return (bound,) if served is exact else (bound, *required.bounds(served, pytorch, metric))


def generation_serving(
    spec: BuildSpec,
    checkpoint: Checkpoint,
    config: GenerationConfig,
    arena: Arena,
    session: Session,
    beams: int,
    fields: Sequence[Field],
    start: int | None = None,
    **family_fields: Any,
) -> GenerationServing:
    """Return the settings, for serving.json, of the emitted loop; the checkpoint's generation_config sets the defaults.

    `start`: of an encoder-decoder, the tokens that its decoder starts with.
    """
    vocabulary = vocabulary_of(checkpoint.model)
    ends = end_ids(config, checkpoint.tokenizer, vocabulary)
    return GenerationServing(
        task=checkpoint.task.name,
        arena=arena,
        session=session,
        vocabulary=vocabulary,
        queue=spec.serving.queue.size,
        queue_timeout_ms=spec.serving.queue.waiting_ms,
        limits=request_limits(spec.serving.limits),
        beams=beams,
        max_tokens=max_tokens(config, start),
        end_ids=ends,
        fields=[field.name for field in fields],
        defaults=option_defaults(config, beams, start),
        rules=known_token_rules(config, ends, vocabulary, generation_file(checkpoint.folder)),
        clean_up=cleans_up(checkpoint.tokenizer),
        **family_fields,
    )


def needing_cpus(serving: GenerationServing, spec: BuildSpec, graphs: Sequence[Graph]) -> GenerationServing:
    """Return `serving` with the instruction sets that its `graphs` need where they run on a CPU."""
    if spec.target != "cpu":
        return serving
    needed = {name for graph in graphs for name in graph_engine(graph.engine).needed_cpus(graph)}
    return replace(serving, needs_cpus_with=sorted(needed))


def quantised_parts(precision: str, parts: Sequence[Quantised]) -> dict[str, Any] | None:
    """Return how many products and embeddings of the graphs were quantised, for the report; None if none were."""
    if not parts:
        return None
    return {
        "precision": precision,
        "matmuls": sum(part.matmuls for part in parts),
        "embeddings": sum(part.embeddings for part in parts),
        "as_stored": sum(part.as_stored for part in parts),
    }


def report_of(
    spec: BuildSpec,
    checkpoint: Checkpoint,
    engine: str,
    memory: ReservedMemory,
    operators: Counter[str],
    entries: Sequence[RepositoryEntry],
    **family_fields: Any,
) -> BuildReport:
    """Return the report of a generating model that `engine` runs: the common facts, and the `family_fields`."""
    task = checkpoint.task
    return BuildReport(
        **built_from(spec, checkpoint),
        engine=engine,
        operators={name: operators[name] for name in OPERATORS if operators[name]},
        metric=task.metric,
        threshold=task.required(spec.quality),
        padding=0.0,
        files=file_hashes(entries),
        memory={purpose: size for purpose, size in asdict(memory).items() if size or purpose in ("cache", "weights")},
        **family_fields,
    )
