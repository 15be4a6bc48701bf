"""`build-repo plan`: the numbers of a deployment from its machine and its load, with the arithmetic."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from builder.commands import screen
from builder.errors import RepositoryError
from builder.spec import load_specs


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo plan",
        description="Plan the models of a models.yaml that state a load, on the machine that it states: instances, "
        "threads, slots, queues, caches, memory and shared memory, with the arithmetic. The exit status is 1 where the "
        "load cannot be held.",
    )
    arguments.add_argument(
        "models", type=Path, metavar="models.yaml", help="its `load:` and `machine:` are planned for"
    )
    arguments.add_argument(
        "--compose", type=Path, metavar="FILE", help="write a file for docker compose with the numbers"
    )
    arguments.add_argument("--service", default="triton", help="the service of docker-compose.yml (default triton)")
    arguments.add_argument("--json", action="store_true", help="print the plan as JSON on standard output")
    return arguments


def run(options: argparse.Namespace) -> int:
    from builder.plan.machine import plan  # loads torch

    plans, machine = plan(load_specs(options.models))
    if options.compose is not None:
        try:
            options.compose.write_text(machine.compose(options.service), "utf-8")
        except OSError as error:
            raise RepositoryError(f"{options.compose} cannot be written ({error.strerror})") from error
    if options.json:
        print(json.dumps({"models": [asdict(one) for one in plans], "machine": asdict(machine)}, indent=1))
    else:
        console = Console()
        for one in plans:
            console.print(_table(one.name, one.lines))
            for note in one.notes:
                console.print(f"  {note}", highlight=False)
            settings = ", ".join(f"{key}: {value}" for key, value in one.settings.items())
            console.print(f"  models.yaml: {settings}", highlight=False)
        console.print(_table("all models", machine.lines))
    lacking = [f"{one.name}: {text}" for one in plans for text in one.lacking] + list(machine.lacking)
    for text in lacking:
        screen.print(f"[yellow]does not hold:[/] {text}", highlight=False, soft_wrap=True)
    return 1 if lacking else 0


def _table(title: str, lines: tuple) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("quantity", no_wrap=True)
    table.add_column("from")
    table.add_column("result", justify="right", no_wrap=True)
    for line in lines:
        table.add_row(line.quantity, line.formula, line.result)
    return table
