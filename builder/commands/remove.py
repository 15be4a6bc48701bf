"""`build-repo remove`: take a model out of a repository."""

from __future__ import annotations

import argparse
from pathlib import Path

from builder.commands import DEFAULT_REPOSITORY, REPOSITORY_HELP, screen


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo remove",
        description="Remove all versions of a model from a repository, and its engine unless another calls it.",
    )
    arguments.add_argument("name", help="name of the model")
    arguments.add_argument("--repository", type=Path, default=DEFAULT_REPOSITORY, help=REPOSITORY_HELP)
    return arguments


def run(options: argparse.Namespace) -> int:
    from builder.triton.transaction import recover
    from builder.triton.versions import remove

    recover(options.repository)
    gone = remove(options.repository, options.name)
    screen.print(f"removed {' and '.join(gone)} from {options.repository}", highlight=False)
    return 0
