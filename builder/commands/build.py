"""`build-repo MODEL`: build and publish one model, or all of a models.yaml."""

from __future__ import annotations

import argparse
import json
import types
import typing
from pathlib import Path
from typing import Any

from builder.clusters.fleet.history import History
from builder.clusters.fleet.plan import plan_builds
from builder.commands import positive, screen
from builder.commands.build_many import build_many, parse_workers
from builder.commands.build_one import build_one
from builder.common.cards import CARDS
from builder.common.errors import SpecError
from builder.options import BuildSpec, Gpu, load_specs, make_spec
from builder.options.build_spec import HEADROOM

OWN = ("model", "rebuild", "dry_run", "workers", "memory_gb", "json", "verbose")  # not options of a BuildSpec


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="build-repo", formatter_class=argparse.RawDescriptionHelpFormatter)
    add = arguments.add_argument
    add("model", metavar="MODEL", help="Hub id, local folder, or models.yaml.")
    for name, field in BuildSpec.model_fields.items():
        if not isinstance(field.json_schema_extra, dict) or not field.json_schema_extra.get("flag"):
            continue
        flags = [f"--{name.replace('_', '-')}", *(["-o"] if name == "output" else [])]
        kind, choices = _kind(field.annotation)
        text = " ".join((field.description or "").split())
        text += f" One of {', '.join(choices)}." if choices else ""
        text += f" Default: {field.default}." if field.default not in (None, False) else ""
        text = text.replace("%", "%%")
        if kind is bool:
            add(*flags, action="store_true", default=argparse.SUPPRESS, help=text)
        else:
            add(*flags, type=kind, choices=choices, default=argparse.SUPPRESS, help=text, metavar=name.upper())
    card = Gpu.model_fields["card"].description
    add("--gpu", choices=list(CARDS), default=argparse.SUPPRESS, metavar="CARD", help=card)
    add(
        "--rebuild",
        action="store_true",
        help="Build again what is published already and unchanged. Without it, nothing is done for such a model.",
    )
    add(
        "--dry-run",
        action="store_true",
        help="Print the plan alone: what is new, changed or unchanged, for how long, and in how much memory.",
    )
    add(
        "--workers",
        type=parse_workers,
        metavar="N|ray",
        help="Processes that build the models of a models.yaml at once, or `ray`: tasks on a Ray cluster. Default: a "
        "process for each core.",
    )
    add(
        "--memory-gb",
        type=positive,
        metavar="GB",
        help=f"Memory that builds at once may take together, in 10^9 bytes. Default: {HEADROOM:.0%}% of what is free.",
    )
    add("--json", action="store_true", help="Print the report as JSON on standard output.")
    add(
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
        history = History()
        plan = plan_builds(specs, history, options.rebuild)
    if options.dry_run or options.workers is not None or len(specs) > 1:
        return build_many(plan, options)
    (model,) = plan.models
    report = build_one(model, history, options.verbose, show=not options.json)
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
