"""The product in one function: a checkpoint becomes a verified, published model repository.

resolve, export, reference, fuse, verify, select, verify where it runs, lay out, publish: each stage takes what the one
before returned. builder/building/families implements the stages of each family of graphs; this module runs them all.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from builder.building.families import Family, begin, hand_over
from builder.building.keys import build_key
from builder.building.stages import Context, keeping
from builder.building.verify.runtimes import verify_where_it_runs
from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.mapped import giving_back
from builder.checkpoints.resolve import locate, resolve
from builder.checkpoints.tokenizer_limits import panics_refused
from builder.common.cache.bound import bounded_cache
from builder.common.errors import RepositoryError
from builder.common.progress import Stage
from builder.common.workplace import workplace
from builder.engines.gpu import refuse_card
from builder.options import BuildSpec
from builder.repository.locks import refuse_unwritable
from builder.repository.publish import existing_source, publish
from builder.repository.report.record import BuildReport
from builder.repository.report.summary import with_summary
from builder.repository.sharing.hosting import refuse_hosted
from builder.repository.stores.publish import publish_to, source_in
from builder.repository.stores.store import Store, open_store
from builder.repository.transaction import recover
from builder.repository.verdict import Unverified, Verified
from builder.repository.versions import front_of, version_numbers
from builder.runtime.contract import DRAFT

Exported = TypeVar("Exported")
Reference = TypeVar("Reference")
Fused = TypeVar("Fused")
Exact = TypeVar("Exact")
Chosen = TypeVar("Chosen")


def build(spec: BuildSpec, stage: Stage = lambda name: nullcontext()) -> BuildReport:
    """Build `spec` and publish it in `spec.output`, or push it to `spec.store`.

    `stage` is a context manager that is entered with the name of each stage, to show progress.
    Raises BuilderError; the repository is then as it was before.
    """
    store = None if spec.store is None else open_store(spec.store)
    recover(spec.output)
    if store is None:
        refuse_unwritable(spec.output)
    with bounded_cache(), workplace() as folder, panics_refused(spec.model):
        with stage("resolve"):
            key, since = build_key(spec), max(version_numbers(spec.output / spec.entry_name), default=0)
            checkpoint = locate(spec.source, weights=False) if spec.runs_checkpoint else resolve(spec)
            _refuse_another_model(store or spec.output, spec, checkpoint.source)
        refuse_card(spec.layout, spec.runs)
        if isinstance(checkpoint, Checkpoint):
            family, stage = _prepared(spec, checkpoint, folder, stage)
            release = spec.triton if spec.target == "cpu" else None  # there is no GPU here to repeat the calls on
            outcome: Verified | Unverified = verified(family, key, release, stage)
        else:  # files alone: vLLM and TensorRT-LLM run the checkpoint as it is, so that there is no graph to compare
            with stage("lay out"):
                result = hand_over(spec, checkpoint)
                outcome = replace(result, report=replace(result.report, build_key=key))
        with stage("publish"):
            if store is not None:
                return publish_to(store, outcome, folder)
            return publish(spec.output, outcome, spec.keep, workplace=folder, since=since)


def _prepared(
    spec: BuildSpec, checkpoint: Checkpoint, folder: Path, stage: Stage
) -> tuple[Family[Any, Any, Any, Any, Any], Stage]:
    """Return the stages of `checkpoint`, with those of its draft if it has one; and `stage`.

    Before each stage, the weights of both are given back.
    """
    stage = giving_back(checkpoint.model, stage)
    family = _family(spec, checkpoint, folder, stage)
    if spec.draft is None:
        return family, stage
    from builder.building.families.decoder.drafted import (  # loads modules that only decoders need
        Drafted,
        resolve_draft,
    )

    with stage("resolve the draft"):
        own, draft = resolve_draft(spec, checkpoint)
    stage = giving_back(draft.model, stage)
    return Drafted(family, _family(own, draft, folder / DRAFT, stage), own.model), stage


def _family(spec: BuildSpec, checkpoint: Checkpoint, folder: Path, stage: Stage) -> Family[Any, Any, Any, Any, Any]:
    """Return the stages of `checkpoint`, with those that the cache has taken from there."""
    folder.mkdir(exist_ok=True)
    return keeping(begin(spec, checkpoint, folder, stage), Context(spec, checkpoint, folder))


def verified(
    family: Family[Exported, Reference, Fused, Exact, Chosen], key: str, release: str | None, stage: Stage
) -> Verified:
    """Run the stages of a family of graphs, in order; `key`: of the whole build. Raises BuilderError.

    `release`: the Triton whose engine repeats the calls; None where it cannot here.
    """
    with stage("export"):
        exported = family.export()
    with stage("measure PyTorch"):
        reference = family.reference(exported)
    with stage("fuse"):
        fused = family.fuse(exported)
    with stage("verify"):
        exact = family.verify(fused, reference)
    chosen = family.select(exact, stage)
    checks = () if release is None else verify_where_it_runs(release, family.replay(chosen), stage)
    entries = family.lay_out(chosen, stage)
    report = replace(family.report(chosen, entries, checks), build_key=key)
    return Verified.after(family.comparison(chosen), with_summary(entries, report), report)


def _refuse_another_model(output: Path | Store, spec: BuildSpec, source: str) -> None:
    """Raise RepositoryError where the build cannot be the next version of what has its name.

    `source`: of its checkpoint. Only an explicit name makes it a version of a model from another checkpoint.
    """
    model = spec.entry_name
    if isinstance(output, Path):
        refuse_hosted(output, model)
    for name in (model, f"{model}_model"):
        before, front = _existing(output, name)
        if before is None or before == source or (front == model and spec.name is not None):
            continue
        raise RepositoryError(
            f"{output if isinstance(output, Path) else output.url} already has a model {name}, built from {before}; "
            f"this one is built from {source}. Give it another name with --name, or "
            + (f"make it the next version with --name {model}" if front == model else "remove that folder first")
        )


def _existing(output: Path | Store, name: str) -> tuple[str | None, str | None]:
    """Return the source of the model `name`, None where there is none, and the name that it was built under."""
    if isinstance(output, Path):
        return existing_source(output, name), front_of(output / name)
    return source_in(output, name), name
