"""A decoder with a draft: a smaller one with the same tokens, whose guesses it verifies while it serves.

The draft goes through the stages of any decoder, beside those of its target, in the same precision and for the same
engine; it is laid into a folder of the target's version (builder/runtime/generation/drafting.py says how it guesses).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from builder.building.families import Family
from builder.building.verify.recording import Case
from builder.building.verify.runtimes import Replay
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.resolve import locate, resolve
from builder.checkpoints.same_tokens import difference
from builder.common.errors import BuilderError, CheckpointError, SpecError
from builder.common.folders import RUNTIME
from builder.common.memory import refuse_slots, weights_bytes
from builder.common.progress import Stage
from builder.engines.decoding import engine_of
from builder.graphs.export.decoder import cache_shapes
from builder.options import BuildSpec
from builder.repository.config.entries import RepositoryEntry
from builder.repository.report.record import BuildReport, EngineCheck
from builder.repository.verdict import Comparison
from builder.runtime.contract import DRAFT
from builder.runtime.generation.scheduler import FEW

SLOTS = FEW // 2  # sequences that guess in one step, at most: each has its own token and a guess

Value = TypeVar("Value")
Steps = Family[Any, Any, Any, Any, Any]


def refuse_draft(spec: BuildSpec) -> None:
    """Raise SpecError if --draft is given and what runs the steps cannot verify a guess."""
    unable = {
        "--engine auto (name the engine)": spec.engine == "auto",
        f"--executor {spec.executor}": spec.executor != "in-process",
        f"--target {spec.target}": spec.target != "cpu",
        "--cache int8 of OpenVINO, which guesses nothing": spec.engine == "openvino" and spec.cache == "int8",
    }
    stated = [name for name, used in unable.items() if used]
    if spec.draft is not None and stated:
        raise SpecError(f"--draft is not for {', '.join(stated)}: it runs in process on the CPU")


def draft_spec(spec: BuildSpec, task: str, length: int) -> BuildSpec:
    """Return the specification of --draft for texts of `length` tokens."""
    own = {"model": spec.draft, "draft": None, "revision": None, "name": None, "task": task, "max_length": length}
    return spec.model_copy(update={**own, "slots": min(spec.slots, SLOTS), "beams": 1, "cache_gb": None})


def resolve_draft(spec: BuildSpec, target: Checkpoint) -> tuple[BuildSpec, Checkpoint]:
    """Return the draft of `spec` and its specification. Raises CheckpointError, and SpecError where memory is short."""
    own = draft_spec(spec, target.task.name, target.max_length)
    with _named(own.model):
        other = difference(locate(own.source, weights=False).tokenizer, target.tokenizer)
        if other is not None:
            raise CheckpointError(f"{other}; a draft has the tokeniser of its target, {target.source}")
        checkpoint = resolve(own)
        caches = [_cache(own, checkpoint), _cache(spec, target)]
    slots = f"{spec.slots} slots of {target.max_length} tokens, and {own.slots} of the draft"
    needs = "the caches of the model and its draft need"
    refuse_slots(sum(caches), spec.usable_memory, needs, slots, "--slots or --max-length")
    return own, checkpoint


def _cache(spec: BuildSpec, checkpoint: Checkpoint) -> int:
    """Return the bytes of the keys and values."""
    shapes, weights = cache_shapes(checkpoint.model), weights_bytes(checkpoint.model)
    return engine_of(spec).plan_memory(shapes, weights, checkpoint.max_length).cache


def _is_shared(path: str, content: bytes | Path) -> bool:
    """Return True for a file of the version folder that a draft has in common with its target."""
    return path == "1/tokenizer.json" or (isinstance(content, Path) and content.is_relative_to(RUNTIME))


def _in_its_folder(case: Case) -> Case:
    return replace(case, name=f"{DRAFT}/{case.name}")


@contextmanager
def _named(draft: str) -> Iterator[None]:
    """Name the draft in errors that are raised inside."""
    try:
        yield
    except BuilderError as error:
        raise type(error)(f"--draft {draft}: {error}") from error


@dataclass(frozen=True)
class Both:
    """Results of one stage for the target and for its draft."""

    target: Any
    draft: Any


@dataclass(frozen=True)
class Drafted:
    """Steps of `target`, each with that of its `draft`, whose checkpoint errors name by `source`."""

    target: Steps
    draft: Steps
    source: str

    def export(self) -> Both:
        return Both(self.target.export(), self._of_draft(self.draft.export))

    def reference(self, exported: Both) -> Both:
        return self._each(self.target.reference, self.draft.reference, exported)

    def fuse(self, exported: Both) -> Both:
        return self._each(self.target.fuse, self.draft.fuse, exported)

    def verify(self, fused: Both, reference: Both) -> Both:
        return self._each(self.target.verify, self.draft.verify, fused, reference)

    def select(self, exact: Both, stage: Stage) -> Both:
        target = self.target.select(exact.target, stage)
        return Both(target, self._of_draft(self.draft.select, exact.draft, lambda name: stage(f"{name} of the draft")))

    def lasts(self, chosen: Both) -> bool:
        return self.target.lasts(chosen.target) and self.draft.lasts(chosen.draft)

    def replay(self, chosen: Both) -> Replay:
        """Return the calls of both, which the same engine repeats."""
        own, draft = self.target.replay(chosen.target), self.draft.replay(chosen.draft)
        return replace(own, cases=lambda: [*own.cases(), *map(_in_its_folder, draft.cases())])

    def lay_out(self, chosen: Both, stage: Stage) -> tuple[RepositoryEntry, ...]:
        """Return the target's entry, with the draft's own files in a folder of it."""
        (entry,), (beside,) = self.target.lay_out(chosen.target, stage), self.draft.lay_out(chosen.draft, stage)
        own = {path: content for path, content in beside.files.items() if not _is_shared(path, content)}
        files = {f"1/{DRAFT}/{path.removeprefix('1/')}": content for path, content in own.items()}
        return (replace(entry, files={**entry.files, **files}),)

    def comparison(self, chosen: Both) -> Comparison:
        own, draft = self.target.comparison(chosen.target), self.draft.comparison(chosen.draft)
        named = (replace(bound, name=f"of the draft, {bound.name}") for bound in draft.bounds)
        return Comparison((*own.bounds, *named))

    def report(self, chosen: Both, entries: Sequence[RepositoryEntry], checks: tuple[EngineCheck, ...]) -> BuildReport:
        """Return the target's report, with the facts about its draft."""
        own, draft = self.target.report(chosen.target, entries, checks), self.draft.report(chosen.draft, (), ())
        served = next(measured for measured in draft.variants if measured.name == draft.chosen)
        return replace(
            own,
            draft={"checkpoint": draft.checkpoint, "served": asdict(served), "kept": draft.kept},
            memory={**(own.memory or {}), "draft": sum((draft.memory or {}).values())},
            warnings=(*own.warnings, *(f"the draft: {warning}" for warning in draft.warnings)),
        )

    def _each(self, step: Callable[..., Any], of_draft: Callable[..., Any], *before: Both) -> Both:
        """Run a step of the target and the same step of the draft on the results of the steps before."""
        target = step(*(both.target for both in before))
        return Both(target, self._of_draft(of_draft, *(both.draft for both in before)))

    def _of_draft(self, step: Callable[..., Value], *arguments: Any) -> Value:
        with _named(self.source):
            return step(*arguments)
