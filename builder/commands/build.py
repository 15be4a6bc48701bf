"""`build-repo MODEL`: build and publish one model, or all of a models.yaml."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from builder.clusters.fleet import executors
from builder.clusters.fleet.executor import Outcome
from builder.clusters.fleet.history import History
from builder.clusters.fleet.plan import Plan, Planned, plan_builds
from builder.clusters.fleet.runs import run_jobs
from builder.clusters.fleet.view import plan_document, plan_line, plan_table, summary, view
from builder.clusters.fleet.work import load_libraries, seldom_collecting
from builder.commands import positive, screen, screen_table
from builder.common.cards import CARDS
from builder.common.errors import SpecError
from builder.common.machine import available_cores, available_memory
from builder.common.releases import NEWEST, lacking
from builder.options import BuildSpec, Gpu, load_specs, make_spec
from builder.options.build_spec import HEADROOM
from builder.repository.check import pending
from builder.repository.report.record import BuildReport

OWN = ("model", "rebuild", "dry_run", "workers", "memory_gb", "json", "verbose")  # not options of a BuildSpec


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="build-repo", formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("model", metavar="MODEL", help="Hub id, local folder, or models.yaml.")
    for name, field in BuildSpec.model_fields.items():
        if not isinstance(field.json_schema_extra, dict) or not field.json_schema_extra.get("flag"):
            continue
        flags = [f"--{name.replace('_', '-')}", *(["-o"] if name == "output" else [])]
        kind, choices = _kind(field.annotation)
        text = " ".join((field.description or "").split())
        text += f" One of {', '.join(choices)}." if choices else ""
        text += f" Default: {field.default}." if field.default not in (None, False) else ""
        if kind is bool:
            arguments.add_argument(*flags, action="store_true", default=argparse.SUPPRESS, help=text)
        else:
            arguments.add_argument(
                *flags, type=kind, choices=choices, default=argparse.SUPPRESS, help=text, metavar=name.upper()
            )
    card = Gpu.model_fields["card"].description
    arguments.add_argument("--gpu", choices=list(CARDS), default=argparse.SUPPRESS, metavar="CARD", help=card)
    arguments.add_argument(
        "--rebuild",
        action="store_true",
        help="Build again what is published already and unchanged. Without it, nothing is done for such a model.",
    )
    arguments.add_argument(
        "--dry-run",
        action="store_true",
        help="Print the plan alone: what is new, changed or unchanged, for how long, and in how much memory.",
    )
    arguments.add_argument(
        "--workers",
        type=executors.count,
        metavar="N|ray",
        help="Processes that build the models of a models.yaml at once, or `ray`: tasks on a Ray cluster. Default: a "
        "process for each core.",
    )
    arguments.add_argument(
        "--memory-gb",
        type=positive,
        metavar="GB",
        help=f"Memory that builds at once may take together, in 10^9 bytes. Default: {HEADROOM:.0%}% of what is free.",
    )
    arguments.add_argument("--json", action="store_true", help="Print the report as JSON on standard output.")
    arguments.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="Show the messages of PyTorch, ONNX Runtime and the other libraries.",
    )
    return arguments


def _kind(annotation: Any) -> tuple[Any, list[Any] | None]:
    """Return the type of a flag and its choices, from a field's annotation."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(part for part in typing.get_args(annotation) if part is not type(None))
    if typing.get_origin(annotation) is typing.Literal:
        choices = list(typing.get_args(annotation))
        return type(choices[0]), choices
    return annotation, None


def run(options: argparse.Namespace) -> int:
    specs = _specs(options)
    with screen.status("looking at checkpoints and at what is published"):
        plan = plan_builds(specs, History(), options.rebuild)
    if options.dry_run or options.workers is not None or len(specs) > 1:
        return _many(plan, options)
    (model,) = plan.models
    report = _one(model, options)
    if options.json:
        print(json.dumps(report.document(), indent=1))
    return 0


def _specs(options: argparse.Namespace) -> list[BuildSpec]:
    flags = {key: value for key, value in vars(options).items() if key not in OWN}
    if not options.model.endswith((".yaml", ".yml")):
        return [make_spec(model=options.model, **flags)]
    if flags:
        raise SpecError(f"with a models.yaml, options belong in the file; found --{min(flags).replace('_', '-')}")
    return load_specs(Path(options.model))


def _many(plan: Plan, options: argparse.Namespace) -> int:
    """Build on workers; a model that fails is reported at the end and stops no other."""
    budget = round(options.memory_gb * 1e9 if options.memory_gb else HEADROOM * available_memory())
    workers = executors.workers(options.workers, len(plan.builds))
    screen.print(plan_line(plan, workers, budget), highlight=False, soft_wrap=True)
    if options.dry_run:
        _show_plan(plan, workers, budget, options.json)
        return 1 if plan.counts["refused"] else 0
    _warn_of_releases(plan)
    begun = time.perf_counter()
    executor = executors.executor(options.workers, workers, budget, options.verbose)
    jobs = plan.jobs(available_cores(), workers)
    outcomes = run_jobs(jobs, executor, History(), view(screen, plan, workers)) if jobs else []
    for line in summary(plan, outcomes, time.perf_counter() - begun):
        screen.print(line, markup=False, highlight=False, soft_wrap=True)
    for outcome in outcomes:
        if outcome.details and options.verbose:
            screen.print(outcome.details, markup=False, highlight=False)
    if options.json:
        print(json.dumps(_documents(plan, outcomes), indent=1))
    return 1 if plan.counts["refused"] or any(outcome.report is None for outcome in outcomes) else 0


def _documents(plan: Plan, outcomes: Sequence[Outcome]) -> Any:
    """Return the reports of all models that are published, built now or before; for one model, that report alone."""
    built = {outcome.name: outcome.report for outcome in outcomes}
    reports = [built.get(model.name) if model.is_built else model.report for model in plan.models]
    documents = [report.document() for report in reports if report is not None]
    return documents[0] if len(plan.models) == len(documents) == 1 else documents


def _show_plan(plan: Plan, workers: int, budget: int, as_json: bool) -> None:
    if as_json:
        print(json.dumps(plan_document(plan, workers, budget), indent=1))
    elif len(plan.models) > plan.counts["unchanged"]:
        screen_table(plan_table(plan))


def _warn_of_releases(plan: Plan) -> None:
    for triton in sorted({model.spec.triton for model in plan.builds}):
        if too_old := older_than_fixes(triton):
            screen.print(f"[yellow]warning:[/] {too_old}", highlight=False, soft_wrap=True)


def _one(model: Planned, options: argparse.Namespace) -> BuildReport:
    """Build in this process, stage by stage; do nothing if nothing changed. Raises BuilderError."""
    spec = model.spec
    screen.print(f"[bold]{spec.entry_name}[/] from {spec.model}", highlight=False)
    if model.status == "unchanged" and model.report is not None:
        report, outcome = model.report, f"nothing to do: version {model.report.version} of {spec.entry_name}"
        done = f"{outcome} is what this would build, and is in {spec.store or spec.output} (--rebuild builds it again)"
    else:
        report = _built(spec, options.verbose)
        outcome = f"version {report.version} of {' and '.join(report.files)}"
        done = f"published {outcome} in {spec.store or spec.output}"
    if not options.json:
        screen_table(report.table())
    screen.print(f"  {done}", highlight=False, soft_wrap=True)
    for name, what in pending(spec.output, unserved=True).items():
        if spec.store is None and name in report.files:
            screen.print(f"  [yellow]next:[/] {what}", highlight=False, soft_wrap=True)
    return report


def _built(spec: BuildSpec, verbose: bool) -> BuildReport:
    with screen.status("loading torch and transformers"):
        load_libraries()
    from builder.building.pipeline import build
    from builder.checkpoints.libraries import quiet_libraries

    if too_old := older_than_fixes(spec.triton):
        screen.print(f"  [yellow]warning:[/] {too_old}", highlight=False, soft_wrap=True)
    with seldom_collecting(), _library_output(verbose), contextlib.nullcontext() if verbose else quiet_libraries():
        report = build(spec, _stage)
    for warning in report.warnings:
        screen.print(f"  [yellow]warning:[/] {warning}", highlight=False)
    if report.choice:
        screen.print(f"  {report.choice}", highlight=False)
    if report.memory:
        parts = ", ".join(f"{size / 1e6:.0f} MB of {what}" for what, size in report.memory.items())
        screen.print(f"  {parts}", highlight=False)
    if report.attention["layers"]:
        fused = ", ".join(f"{count} {name}" for name, count in report.operators.items())
        screen.print(
            f"  attention fused in {report.attention['fused']} of {report.attention['layers']} layers; {fused}",
            highlight=False,
            soft_wrap=True,
        )
    return report


def older_than_fixes(triton: str) -> str:
    """Return why a release is not for untrusted clients, in one line; empty where no problem is known."""
    fixes = lacking(triton)
    reasons = "; ".join(f"{fix.what} (mended in {fix.since}: {fix.source})" for fix in fixes)
    return f"Triton {triton} is older than known fixes: {reasons}. Build for {NEWEST} if you can (--triton)" * bool(
        fixes
    )


@contextlib.contextmanager
def _stage(name: str) -> Iterator[None]:
    """Print one line per stage: a spinner while it runs, its time when it is done."""
    start = time.perf_counter()
    with screen.status(name):
        yield
    screen.print(f"  [green]✓[/] {name:<16} {time.perf_counter() - start:6.1f} s", highlight=False)


@contextlib.contextmanager
def _library_output(shown: bool) -> Iterator[None]:
    """Send what libraries print, from Python or C++, to standard error, or nowhere: never to standard output."""
    sys.stdout.flush()
    duplicate = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(2 if shown else nowhere.fileno(), 1)
            yield
    finally:
        sys.stdout.flush()
        os.dup2(duplicate, 1)
        os.close(duplicate)
