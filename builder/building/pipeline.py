"""Build and publish a verified model repository from a checkpoint.

resolve, export, reference, fuse, verify, select, verify where it runs, lay out, publish: each stage takes what the one
before returned. builder/building/families implements the stages of each family of graphs; this module runs them all.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from builder.building.families import BuiltModel, Family, begin
from builder.building.families.whole_checkpoint import hand_over
from builder.building.keys import build_key
from builder.building.stages import Context, StageCache
from builder.building.verify.runtimes import verify_where_it_runs
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.mapped import giving_back
from builder.checkpoints.resolve import locate, resolve
from builder.checkpoints.tokenizer_limits import panics_refused
from builder.common.cache.entries import bounded_cache
from builder.common.errors import RepositoryError, SpecError
from builder.common.progress import Stage
from builder.common.workplace import build_folder
from builder.engines import missing
from builder.engines.gpu import refuse_card
from builder.options import BuildSpec
from builder.repository.locks import refuse_unwritable
from builder.repository.publish import existing_source, publish
from builder.repository.report.record import BuildReport, with_summary
from builder.repository.sharing.hosting import refuse_hosted
from builder.repository.stores.opening import VersionStore, chosen_version, open_versions
from builder.repository.stores.transfer import publish_to, source_in
from builder.repository.transaction import recover
from builder.repository.verdict import Unverified, Verified
from builder.repository.versions import front_of, version_numbers
from builder.runtime.contract import DRAFT

if TYPE_CHECKING:
    from builder.building.families.decoder.drafted import DraftedModel


def build(spec: BuildSpec, stage: Stage = lambda name: nullcontext()) -> BuildReport:
    """Build `spec` and publish it in `spec.output`, or push it to `spec.store`.

    `stage` is a context manager that is entered with the name of each stage, to show progress.
    Raises BuilderError; the repository is then as it was before.
    """
    if (reason := missing(spec.engine)) is not None:
        raise SpecError(reason)
    store = None if spec.store is None else open_versions(spec.store)
    version = None if spec.store is None else chosen_version(spec.store, None)
    recover(spec.output)
    if store is None:
        refuse_unwritable(spec.output)
    with bounded_cache(), build_folder() as folder, panics_refused(spec.model):
        with stage("resolve"):
            if store is not None and version in store.versions(spec.entry_name):
                raise RepositoryError(f"{store.url} has a version {version} already: leave it out for the next one")
            key, since = build_key(spec), max(version_numbers(spec.output / spec.entry_name), default=0)
            checkpoint = locate(spec.source, weights=False) if spec.runs_checkpoint else resolve(spec)
            _refuse_another_model(store or spec.output, spec, checkpoint.source)
        refuse_card(spec, spec.runs)
        if isinstance(checkpoint, Checkpoint):
            outcome: Verified | Unverified = verified(spec, checkpoint, key, folder, stage)
        else:  # files alone: vLLM and TensorRT-LLM run the checkpoint as it is, so that there is no graph to compare
            with stage("lay out"):
                result = hand_over(spec, checkpoint)
                outcome = replace(result, report=replace(result.report, build_key=key))
        with stage("publish"):
            if store is not None:
                return publish_to(store, outcome, folder, version)
            return publish(spec.output, outcome, spec.keep, workplace=folder, since=since)


def verified(spec: BuildSpec, checkpoint: Checkpoint, key: str, folder: Path, stage: Stage) -> Verified:
    """Select a variant of `checkpoint` and lay it out; `key`: of the whole build. Raises BuilderError.

    Before each stage, the memory of weights that are mapped from their file is given back.
    """
    stage = giving_back(checkpoint.model, stage)
    family = begin(spec, checkpoint, folder, stage)
    selected: BuiltModel | DraftedModel
    if spec.draft is None:
        selected = select_variant(family, Context(spec, checkpoint, folder), stage)
    else:
        selected = _select_with_draft(family, Context(spec, checkpoint, folder), stage)
    on_cpu = spec.target == "cpu"  # there is no GPU here to repeat the calls on
    checks = verify_where_it_runs(spec.triton, selected.replay(), stage) if on_cpu else ()
    result = selected.result(stage)
    report = replace(result.report, build_key=key, verified_on=checks)
    return Verified.after(result.comparison, with_summary(result.entries, report), report)


def select_variant(family: Family, context: Context, stage: Stage) -> BuiltModel:
    """Run the stages of `family` in order, except those that an earlier build ran with the same key."""
    cache = StageCache.of(context)
    with stage("export"):
        exported = cache.run("export", family.export)
    with stage("measure PyTorch"):
        reference = cache.run("reference", lambda: family.reference(exported()))
    with stage("fuse"):
        fused = cache.run("fuse", lambda: family.fuse(exported()))
    with stage("verify"):
        exact = cache.run("verify", lambda: family.verify(fused(), reference()))
    choice = cache.run("select", lambda: family.select(exact(), stage), lambda choice: choice.is_cacheable)
    return BuiltModel(family, choice(), cache.reused)


def _select_with_draft(family: Family, context: Context, stage: Stage) -> DraftedModel:
    """Select a variant of the checkpoint in `context`, then one of its draft; only decoders load that module."""
    from builder.building.families.decoder.drafted import DraftedModel, naming_draft, resolve_draft, select_draft
    from builder.building.families.decoder.one_engine import Decoder

    if isinstance(family, Decoder) and family.draft is not None:
        return select_draft(family, lambda: select_variant(family, context, stage), context.folder / DRAFT, stage)
    with stage("resolve the draft"):
        spec, checkpoint = resolve_draft(context.spec, context.checkpoint)
    stage = giving_back(checkpoint.model, stage)
    draft = Context(spec, checkpoint, context.folder / DRAFT)
    draft.folder.mkdir(exist_ok=True)
    draft_family = begin(spec, checkpoint, draft.folder, stage)
    target = select_variant(family, context, stage)
    with naming_draft(spec.model):
        return DraftedModel(target, select_variant(draft_family, draft, lambda name: stage(f"{name} of the draft")))


def _refuse_another_model(output: Path | VersionStore, spec: BuildSpec, source: str) -> None:
    """Raise RepositoryError if the build cannot be the next version of the model that has its name.

    `source`: of its checkpoint. Only an explicit name makes it a version of a model from another checkpoint.
    """
    model = spec.entry_name
    if isinstance(output, Path):
        refuse_hosted(output, model)
    for name in (model, spec.engine_name):
        before, front = _existing(output, name)
        if before is None or before == source or (front == model and spec.name is not None):
            continue
        raise RepositoryError(
            f"{output if isinstance(output, Path) else output.url} already has a model {name}, built from {before}; "
            f"this one is built from {source}. Give it another name with --name, or "
            + (f"make it the next version with --name {model}" if front == model else "remove that folder first")
        )


def _existing(output: Path | VersionStore, name: str) -> tuple[str | None, str | None]:
    """Return the source of the model `name`, None if there is none, and the name that it was built under."""
    if isinstance(output, Path):
        return existing_source(output, name), front_of(output / name)
    return source_in(output, name), name
