"""`build-repo adapter`: the LoRA adapters of a model, added and removed while it is served."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from rich.table import Table

from builder.commands import REPOSITORY, screen, screen_table
from builder.commands.downloads import loading


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo adapter",
        description="Show the LoRA adapters of a model that was built with --adapters, after adding or removing some. "
        "A server that runs the model finds a change with the next request that names the adapter.",
    )
    add = arguments.add_argument
    add("name", help="name of the model")
    add(
        "--add",
        metavar="ADAPTER",
        type=_named,
        action="append",
        default=[],
        help="adapter to add as NAME=PATH: a folder as PEFT saves it, or a Hub id; one of that name is replaced",
    )
    add("--remove", metavar="ADAPTER", action="append", default=[], help="name of an adapter to remove")
    add(
        "--base",
        metavar="MODEL",
        help="folder or Hub id of the checkpoint that the model was built from, with which the answers of an adapter "
        "are compared; default: the Hub id that build.json names",
    )
    add("--repository", **REPOSITORY)
    return arguments


def run(options: argparse.Namespace) -> int:
    from builder.repository.adapters import read_adapters, remove_adapter
    from builder.repository.transaction import recover

    recover(options.repository)
    for name in options.remove:
        remove_adapter(options.repository, options.name, name)
        screen.print(f"removed {name} from {options.name}")
    for name, source in options.add:
        from builder.building.adapters import add_adapter  # loads torch

        with loading(lambda: "adding the adapter"):
            about = add_adapter(options.repository, options.name, name, source, options.base)
        screen.print(f"added {name} to {options.name}")
        if about.verified is None:
            screen.print(f"its answers were compared with nothing: name the checkpoint of {options.name} with --base")
    table = Table(title=f"adapters of {options.name} in {options.repository}", title_justify="left")
    for column in ("adapter", "source", "rank", "trained on", "agreement", "largest error"):
        table.add_column(column)
    for name, about in read_adapters(options.repository, options.name).items():
        facts = asdict(about)
        numbers = ("-" if facts[key] is None else f"{facts[key]:.3g}" for key in ("agreement", "error"))
        table.add_row(name, about.source, str(about.rank), about.base or "-", *numbers)
    screen_table(table)
    return 0


def _named(text: str) -> tuple[str, str]:
    """Parse ADAPTER=PATH."""
    name, equals, source = text.partition("=")
    if not (name and equals and source):
        raise argparse.ArgumentTypeError(f"{text!r} is not ADAPTER=PATH")
    return name, source
