"""Build a decoder with a draft: a smaller decoder of the same vocabulary, or layers, whose proposals it verifies.

A draft that is a decoder goes through the usual stages after its target, in the same precision and for the same engine.
Layers read hidden states of the target, which are an output of its graph (hidden_states.py). The files of either are in
a folder of the target's version. See builder/runtime/generation/speculation.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from builder.building.families import BuiltModel, Result
from builder.building.families.decoder.hidden_states import BuiltDraft, build_draft
from builder.building.families.decoder.one_engine import Decoder
from builder.building.families.decoder.outputs import SelectedDecoder
from builder.building.verify.runtimes import Replay
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.drafts import draft_format
from builder.checkpoints.drafts.layers import DraftLayers
from builder.checkpoints.drafts.loading import HiddenStatesDraft, load_draft
from builder.checkpoints.resolve import locate, resolve
from builder.checkpoints.tokenizer import vocabulary_difference
from builder.common.distribution import RUNTIME
from builder.common.errors import BuilderError, CheckpointError, SpecError
from builder.common.memory import ReservedMemory, refuse_slots, weights_bytes
from builder.common.progress import Stage
from builder.engines.decoding import engine_of
from builder.graphs.export.decoder import cache_shapes
from builder.graphs.export.drafts import draft_cache_shapes
from builder.options import BuildSpec
from builder.repository.report.record import file_hashes
from builder.repository.verdict import Comparison
from builder.runtime.contract import DRAFT
from builder.runtime.generation.scheduler import MAX_DRAFTED_STEP_TOKENS

SLOTS = MAX_DRAFTED_STEP_TOKENS // 2  # at most: a sequence that guesses has two tokens in a step, its own and a guess


def refuse_draft(spec: BuildSpec) -> None:
    """Raise SpecError if --draft is given with an engine, executor or target that cannot verify a guess."""
    unable = {
        "--engine auto (name the engine)": spec.engine == "auto",
        f"--executor {spec.executor}": spec.executor != "in-process",
        f"--target {spec.target}": spec.target != "cpu",
    }
    given = [name for name, used in unable.items() if used]
    if spec.draft is not None and given:
        raise SpecError(f"--draft is not for {', '.join(given)}: it runs in process on the CPU")
    if spec.draft is not None and spec.adapters:
        raise SpecError(
            "--draft is not for --adapters: a draft guesses what the model without them says; leave one out"
        )


def load_hidden_states_draft(spec: BuildSpec, target: Checkpoint) -> HiddenStatesDraft | None:
    """Return --draft if it reads hidden states of `target`; None if it is a decoder, or not given.

    Raises CheckpointError, and SpecError for a model that keeps states.
    """
    source = spec.draft_source
    if source is None:
        return None
    with naming_draft(source.model):
        if draft_format(source, spec.source) is None:
            return None
        _refuse_states(target)
        return load_draft(source, spec.source, target)


def memory_of_draft(spec: BuildSpec, layers: DraftLayers, target: Checkpoint) -> ReservedMemory:
    """Return the bytes of a draft and its cache, and of the hidden states of all tokens that its target caches.

    `spec`: of the target. Raises SpecError where memory is short.
    """
    own, length = _hidden_states_draft_spec(spec, target), target.max_length
    memory = engine_of(own).plan_memory(draft_cache_shapes(layers), weights_bytes(layers), length)
    engine, shapes = engine_of(spec), cache_shapes(target.model)
    of_target = engine.plan_memory(shapes, weights_bytes(target.model), length)
    tokens = engine.cached_tokens(shapes, of_target, length)
    states = tokens * layers.states.size * np.dtype(np.float32).itemsize
    needs = "the caches of the model and its draft, and the hidden states that it reads, need"
    slots = f"{spec.slots} slots of {length} tokens, and {own.slots} of the draft"
    refuse_slots(of_target.cache + memory.cache + states, spec.usable_memory, needs, slots, "--slots or --max-length")
    return ReservedMemory(memory.cache + states, memory.weights)


def draft_spec(spec: BuildSpec, task: str, length: int) -> BuildSpec:
    """Return the specification of --draft for texts of `length` tokens."""
    own = {"model": spec.draft, "draft": None, "revision": None, "name": None, "task": task, "max_length": length}
    loop = {"slots": min(spec.slots, SLOTS), "beams": 1, "cache_gb": None, "adapters": 0}
    return spec.model_copy(update={**own, **loop})


def _hidden_states_draft_spec(spec: BuildSpec, target: Checkpoint) -> BuildSpec:
    """Return the specification of a --draft that reads hidden states; its cache is always in fp32."""
    return draft_spec(spec, target.task.name, target.max_length).model_copy(update={"cache": "fp32"})


def resolve_draft(spec: BuildSpec, target: Checkpoint) -> tuple[BuildSpec, Checkpoint]:
    """Return the draft of `spec` and its specification. Raises CheckpointError, and SpecError where memory is short."""
    own = draft_spec(spec, target.task.name, target.max_length)
    with naming_draft(own.model):
        other = vocabulary_difference(locate(own.source, weights=False).tokenizer, target.tokenizer)
        if other is not None:
            raise CheckpointError(f"{other}; a draft has the tokeniser of its target, {target.source}")
        checkpoint = resolve(own)
        caches = [_cache(own, checkpoint), _cache(spec, target)]
    slots = f"{spec.slots} slots of {target.max_length} tokens, and {own.slots} of the draft"
    needs = "the caches of the model and its draft need"
    refuse_slots(sum(caches), spec.usable_memory, needs, slots, "--slots or --max-length")
    return own, checkpoint


def _cache(spec: BuildSpec, checkpoint: Checkpoint) -> int:
    """Return the bytes of the keys and values. Raises SpecError for layers that keep a state."""
    _refuse_states(checkpoint)
    shapes, weights = cache_shapes(checkpoint.model), weights_bytes(checkpoint.model)
    return engine_of(spec).plan_memory(shapes, weights, checkpoint.max_length).cache


def _refuse_states(checkpoint: Checkpoint) -> None:
    if any(shape.states for shape in cache_shapes(checkpoint.model)):
        raise SpecError(
            f"layers of {checkpoint.model.config.model_type} keep a state, which a rejected guess cannot be taken out "
            "of: build it without --draft"
        )


@contextmanager
def naming_draft(draft: str) -> Iterator[None]:
    """Name the draft in errors that are raised inside."""
    try:
        yield
    except BuilderError as error:
        raise type(error)(f"--draft {draft}: {error}") from error


@dataclass(frozen=True)
class DraftedModel:
    """Decoder, `target`, and its `draft`, to be published as one model."""

    target: BuiltModel
    draft: BuiltModel | BuiltDraft

    def replay(self) -> Replay:
        """Return the calls of both, which the same engine repeats."""
        target, draft = self.target.replay(), self.draft.replay()
        return replace(
            target,
            cases=lambda: [*target.cases(), *(replace(case, name=f"{DRAFT}/{case.name}") for case in draft.cases())],
        )

    def result(self, stage: Stage) -> Result:
        """Return the target's entry with the draft's own files in a folder of it, and all that was measured of both."""
        target, draft = self.target.result(stage), self.draft.result(stage)
        (entry,), (draft_entry,) = target.entries, draft.entries
        own = {
            f"1/{DRAFT}/{path.removeprefix('1/')}": content
            for path, content in draft_entry.files.items()
            if path != "1/tokenizer.json" and not _is_emitted(content)
        }
        emitted = {path: content for path, content in draft_entry.files.items() if _is_emitted(content)}
        entry = replace(entry, files={**emitted, **entry.files, **own})
        bounds = (replace(bound, name=f"of the draft, {bound.name}") for bound in draft.comparison.bounds)
        comparison = Comparison((*target.comparison.bounds, *bounds))
        about, report = draft.report, target.report
        served = about.served
        report = replace(
            report,
            files=file_hashes([entry]),
            draft={"checkpoint": about.checkpoint, "served": asdict(served), "kept": about.kept},
            memory={**(report.memory or {}), "draft": sum((about.memory or {}).values())},
            warnings=(*report.warnings, *(f"the draft: {warning}" for warning in about.warnings)),
        )
        return Result((entry,), comparison, report)


def select_draft(family: Decoder, target: Callable[[], BuiltModel], folder: Path, stage: Stage) -> DraftedModel:
    """Build the `target`, and the draft that reads its hidden states in the precision that was selected for it.

    Raises BuilderError.
    """
    assert family.draft is not None
    own = _hidden_states_draft_spec(family.spec, family.checkpoint)
    memory = memory_of_draft(family.spec, family.draft.layers, family.checkpoint)
    built = target()
    assert isinstance(built.choice, SelectedDecoder)
    own = own.model_copy(update={"precision": built.choice.selection.chosen.option})
    with naming_draft(own.model):
        draft = build_draft(family, own, memory, folder, lambda name: stage(f"{name} of the draft"))
    return DraftedModel(built, draft)


def _is_emitted(content: bytes | Path) -> bool:
    return isinstance(content, Path) and content.is_relative_to(RUNTIME)
