"""`build-repo verify`: check that every model of a repository is the one that was signed."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.markup import escape

from builder.commands import REPOSITORY, VERIFY_KEY_HELP, screen
from builder.repository.signatures import unsigned


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo verify",
        description="Verify the signatures of a repository: every folder signed by the key, and no file of it changed, "
        "added or removed since. Needs the extra sign, and no network.",
    )
    add = arguments.add_argument
    add("repository", nargs="?", **REPOSITORY)
    add("--key", type=Path, required=True, metavar="FILE", help=VERIFY_KEY_HELP)
    return arguments


def run(options: argparse.Namespace) -> int:
    problems = unsigned(options.repository, options.key)
    for problem in problems:
        screen.print(f"[red]✗[/] {escape(problem)}", soft_wrap=True)
    if not problems:
        screen.print(f"[green]✓[/] {options.repository}: every signature holds")
    return int(bool(problems))
