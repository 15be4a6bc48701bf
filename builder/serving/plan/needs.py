"""Read a model's needs: its sizes, from its repository or its checkpoint's config, and its speed, from its build."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from builder.common.errors import RepositoryError, SpecError
from builder.common.memory import conversion_bytes, encoder_call, largest_call
from builder.common.speed import Latencies
from builder.engines import session_engine
from builder.options import BuildSpec
from builder.repository.config.render import parse
from builder.repository.publish import existing_source
from builder.repository.report.record import read_report
from builder.repository.versions import served_number
from builder.runtime.contract import CacheType, EncoderServing, LayerShape, load

BIAS, CONVERSION = "bias on positions", "keys and values in fp32"  # of the largest calls of a decode loop
STRING = 64  # bytes of a text in an answer, such as a label or a name


@dataclass(frozen=True)
class ModelNeeds:
    """Sizes and speeds of a model.

    `weights`: bytes of one instance, its adapters included. `length`: tokens of a text or of a slot. `cross`:
    layers of cross-attention, over `source` tokens. `draft`: bytes of the draft model, its cache included. `bias`:
    bytes of a bias on positions, for each token of a call and each position.
    `call_token`: bytes of the largest call of an encoder, for each of its tokens.
    `activations`: bytes that the largest call of one instance computes on a GPU, and `activated` the formula for them.
    `sized`: options of its cache that a card's memory decides, where the specification leaves them open.
    """

    kind: Literal["encoder", "generation"]
    weights: int
    length: int
    layers: Sequence[LayerShape] = ()
    cross: Sequence[LayerShape] = ()
    source: int = 0
    cache: CacheType = "float32"
    paged: bool = False  # sequences share the blocks of the cache
    engine: str = ""  # of a decode loop
    latency: Latencies | None = None
    measured: str = ""
    faster: str = ""
    answer_bytes: int = STRING
    draft: int = 0
    bias: int = 0
    call_token: int = 0
    activations: int = 0
    activated: str = ""
    sized: Mapping[str, float] = field(default_factory=dict)

    def call_bytes(self, token_budget: int) -> int:
        """Return the bytes of an encoder's largest call."""
        return encoder_call(token_budget, self.length) * self.call_token

    def besides_cache(self, tokens: int, length: int) -> dict[str, int]:
        """Return the bytes beside weights and cache, of calls of `tokens` tokens and slots of `length`, by purpose."""
        return {
            "the draft": self.draft,
            BIAS: tokens * length * self.bias,
            CONVERSION: conversion_bytes(self.layers, self.cache, length),
        }


def needs_of(spec: BuildSpec) -> ModelNeeds:
    """Return the needs of the published model if it was built from this checkpoint, else by the checkpoint's config.

    Raises SpecError for models that another engine runs, BuilderError for unreadable files.
    """
    if spec.runs_checkpoint:
        raise SpecError(f"{spec.entry_name}: {spec.engine} plans its own memory and batches; give it its own arguments")
    source = existing_source(spec.output, spec.entry_name)
    built = source is not None and source in (spec.model.rstrip("/"), Path(spec.model).resolve().name)
    if built and spec.target == "cpu":
        return published(spec.output, spec.entry_name)
    from builder.serving.plan.unbuilt import needs_of_checkpoint, on_gpu  # imports torch

    needs = published(spec.output, spec.entry_name) if built else needs_of_checkpoint(spec)
    return needs if spec.target == "cpu" else on_gpu(spec, needs)


def published(repository: Path, name: str) -> ModelNeeds:
    """Return the needs of a model that was built. Raises RepositoryError."""
    report = read_report(repository, name)
    folder = served_version(repository / name)
    serving = load(folder)
    variant = report.served
    timed = [other for other in report.variants if other.latency_ms]
    better = min(timed, key=lambda other: sum(other.latency_ms.values()), default=variant)
    needs = ModelNeeds(
        "encoder" if isinstance(serving, EncoderServing) else "generation",
        weights=variant.size + (report.memory or {}).get("adapters", 0),
        length=serving.max_length if isinstance(serving, EncoderServing) else serving.arena.length,
        latency=variant.latency_ms or None,
        measured=f"{report.chosen}, measured by its build on {report.cpu['model']}",
        faster="" if better is variant else better.name,
        answer_bytes=_answer_bytes(repository / name),
        draft=(report.memory or {}).get("draft", 0),
    )
    if isinstance(serving, EncoderServing):
        tokens = encoder_call(serving.batching.token_budget, serving.max_length)
        return replace(needs, call_token=-(-(report.memory or {}).get("activations", 0) // tokens))
    arena, source = serving.arena, serving.source
    bias = (report.memory or {}).get("bias", 0)
    return replace(
        needs,
        layers=arena.layers,
        cache=arena.dtype,
        paged=arena.blocks is not None,
        engine=session_engine(serving.session).name,
        cross=() if source is None else source.layers,
        source=0 if source is None else source.max_length,
        bias=bias // (largest_call(serving.prefill_tokens or 0, arena.slots) * arena.length),
    )


def served_version(model: Path) -> Path:
    """Return the folder of the version that is served. Raises RepositoryError."""
    number = served_number(model)
    if number is None:
        raise RepositoryError(f"{model.name} has no version that is served: build it again")
    return model / str(number)


def _answer_bytes(model: Path) -> int:
    """Return the bytes of the fixed dimensions of its outputs; a text or a free dimension counts as a short text."""
    config = parse((model / "config.pbtxt").read_text("utf-8"), model.name)
    total = 0
    for output in config.output:
        size = math.prod(max(dim, 1) for dim in output.dims)
        total += size * 4 if min(output.dims, default=1) > 0 and size > 1 else STRING
    return total
