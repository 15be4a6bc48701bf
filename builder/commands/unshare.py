"""`build-repo unshare`: give encoders of a shared front a front of their own again."""

from __future__ import annotations

import argparse
from pathlib import Path

from builder.commands import DEFAULT_REPOSITORY, REPOSITORY_HELP, screen


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo unshare",
        description="Move encoders out of a shared front, with all their versions: Triton loads each by its own name "
        "again.",
    )
    arguments.add_argument("models", nargs="+", metavar="MODEL", help="names of encoders that the shared front hosts")
    arguments.add_argument("--name", required=True, help="name of the shared front")
    arguments.add_argument("--repository", type=Path, default=DEFAULT_REPOSITORY, help=REPOSITORY_HELP)
    return arguments


def run(options: argparse.Namespace) -> int:
    from builder.triton.share import unshare
    from builder.triton.transaction import recover

    recover(options.repository)
    left = unshare(options.repository, options.name, options.models)
    screen.print(
        f"{', '.join(dict.fromkeys(options.models))} left {options.name}, which answers for {len(left)} models",
        highlight=False,
    )
    return 0
