"""`build-repo share`: one front, in one process, for many encoders."""

from __future__ import annotations

import argparse
from pathlib import Path

from builder.commands import DEFAULT_REPOSITORY, REPOSITORY_HELP, screen


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo share",
        description="Have one Triton model answer for many encoders of one task, in one process that loads each when "
        "it is asked for. The models move into its folder; their next versions are built there.",
    )
    arguments.add_argument("models", nargs="*", metavar="MODEL", help="names of encoders in the repository")
    arguments.add_argument("--name", required=True, help="name of the shared front, which is made at its first use")
    arguments.add_argument(
        "--memory-mb",
        type=int,
        metavar="MB",
        help="memory that its process may take: models that were not asked for longest make room (default: what it "
        "has, 2048 for a new one)",
    )
    arguments.add_argument("--repository", type=Path, default=DEFAULT_REPOSITORY, help=REPOSITORY_HELP)
    return arguments


def run(options: argparse.Namespace) -> int:
    from builder.triton.share import share
    from builder.triton.transaction import recover

    recover(options.repository)
    hosted = share(options.repository, options.name, options.models, options.memory_mb)
    screen.print(f"{options.name} answers for {len(hosted)} models: {', '.join(hosted[:10])}", highlight=False)
    return 0
