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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from builder.commands import screen, screen_table
from builder.engines.gpu import CARDS
from builder.errors import SpecError
from builder.spec import BuildSpec, Gpu, load_specs, make_spec
from builder.triton.releases import NEWEST, lacking


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
    arguments.add_argument("--json", action="store_true", help="Print the report as JSON on standard output.")
    arguments.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="Show the messages of PyTorch, ONNX Runtime and the other libraries.",
    )
    return arguments


def _kind(annotation: Any) -> tuple[Any, list[Any] | None]:
    """The type of a flag and its choices, from a field's annotation."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        annotation = next(part for part in typing.get_args(annotation) if part is not type(None))
    if typing.get_origin(annotation) is typing.Literal:
        choices = list(typing.get_args(annotation))
        return type(choices[0]), choices
    return annotation, None


def run(options: argparse.Namespace) -> int:
    flags = {key: value for key, value in vars(options).items() if key not in ("model", "json", "verbose")}
    if options.model.endswith((".yaml", ".yml")):
        if flags:
            raise SpecError(f"with a models.yaml, options belong in the file; found --{min(flags).replace('_', '-')}")
        specs = load_specs(Path(options.model))
    else:
        specs = [make_spec(model=options.model, **flags)]

    with screen.status("loading torch and transformers"):
        from builder.checkpoint.libraries import quiet_libraries
        from builder.pipeline import build
        from builder.triton.check import pending

    reports = []
    for spec in specs:
        screen.print(f"[bold]{spec.entry_name}[/] from {spec.model}", highlight=False)
        if too_old := older_than_fixes(spec.triton):
            screen.print(f"  [yellow]warning:[/] {too_old}", highlight=False, soft_wrap=True)
        with _library_output(options.verbose), contextlib.nullcontext() if options.verbose else quiet_libraries():
            report = build(spec, _stage)
        reports.append(report)
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
        if not options.json:
            screen_table(report.table())
        made = f"version {report.version} of {' and '.join(report.files)}"
        screen.print(f"  published {made} in {spec.store or spec.output}", highlight=False, soft_wrap=True)
        for name, what in pending(spec.output, unserved=True).items():
            if spec.store is None and name in report.files:
                screen.print(f"  [yellow]next:[/] {what}", highlight=False, soft_wrap=True)
    if options.json:
        documents = [report.document() for report in reports]
        print(json.dumps(documents if len(documents) > 1 else documents[0], indent=1))
    return 0


def older_than_fixes(triton: str) -> str:
    """Why a release is not for clients that are not trusted, in a line; empty where nothing is known against it."""
    fixes = lacking(triton)
    reasons = "; ".join(f"{fix.what} (mended in {fix.since}: {fix.source})" for fix in fixes)
    return f"Triton {triton} is older than known fixes: {reasons}. Build for {NEWEST} if you can (--triton)" * bool(
        fixes
    )


@contextlib.contextmanager
def _stage(name: str) -> Iterator[None]:
    """One line a stage: a spinner while it runs, its time when it is done."""
    start = time.perf_counter()
    with screen.status(name):
        yield
    screen.print(f"  [green]✓[/] {name:<16} {time.perf_counter() - start:6.1f} s", highlight=False)


@contextlib.contextmanager
def _library_output(shown: bool) -> Iterator[None]:
    """Send what libraries print, from Python or C++, to standard error, or nowhere: never to standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(2 if shown else nowhere.fileno(), 1)
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
