"""`build-repo check`: lint a repository without a server."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.markup import escape

from builder.commands import DEFAULT_REPOSITORY, REPOSITORY_HELP, VERIFY_KEY_HELP, screen
from builder.errors import SpecError
from builder.triton.check import check, pending, verdicts, warnings
from builder.triton.publish import recover
from builder.triton.releases import RELEASES
from builder.triton.signatures import unsigned


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo check", description="Check a repository without starting a server."
    )
    arguments.add_argument("repository", nargs="?", type=Path, default=DEFAULT_REPOSITORY, help=REPOSITORY_HELP)
    arguments.add_argument(
        "--triton",
        metavar="RELEASE",
        help="Triton release to check against (default: the one that each model was built for)",
    )
    arguments.add_argument("--verify-key", type=Path, metavar="FILE", help=f"verify signatures: {VERIFY_KEY_HELP}")
    return arguments


def run(options: argparse.Namespace) -> int:
    if options.triton is not None and options.triton not in RELEASES:
        raise SpecError(f"Triton {options.triton} is not known; known are {', '.join(RELEASES)}")
    for name in recover(options.repository):
        screen.print(f"{name}: an interrupted build was undone", highlight=False)
    problems = [*check(options.repository, options.triton), *pending(options.repository).values()]
    if options.verify_key is not None:
        problems += unsigned(options.repository, options.verify_key)
    for problem in problems:
        screen.print(f"[red]✗[/] {escape(problem)}", highlight=False, soft_wrap=True)
    for warning in warnings(options.repository, options.triton):
        screen.print(f"[yellow]![/] {escape(warning)}", highlight=False, soft_wrap=True)
    for name, verdict in verdicts(options.repository).items():
        screen.print(f"  {name}: {escape(verdict)}", highlight=False, soft_wrap=True)
    if not problems:
        screen.print(f"[green]✓[/] {options.repository}: no problem found", highlight=False)
    return int(bool(problems))
