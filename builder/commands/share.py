"""`build-repo share`: one front, in one process, for many encoders."""

from __future__ import annotations

import argparse

from builder.commands import REPOSITORY, screen


def parser() -> argparse.ArgumentParser:
    arguments = front_parser(
        "share",
        "Have one Triton model answer for many encoders of one task, in one process that loads each when it is asked "
        "for. The models move into its folder; their next versions are built there.",
        models=("*", "names of encoders in the repository"),
        name="name of the shared front, which is made at its first use",
    )
    arguments.add_argument(
        "--memory-mb",
        type=int,
        metavar="MB",
        help="memory that its process may take, in 2^20 bytes: the least recently used models make room (default: what "
        "it has, 2048 for a new one)",
    )
    return arguments


def front_parser(verb: str, description: str, models: tuple[str, str], name: str) -> argparse.ArgumentParser:
    """Return the parser of a verb for a shared front.

    `models`: how many it takes, and their help; `name`: the help of --name.
    """
    arguments = argparse.ArgumentParser(prog=f"build-repo {verb}", description=description)
    add = arguments.add_argument
    add("models", nargs=models[0], metavar="MODEL", help=models[1])
    add("--name", required=True, help=name)
    add("--repository", **REPOSITORY)
    return arguments


def run(options: argparse.Namespace) -> int:
    from builder.repository.sharing.share import share
    from builder.repository.transaction import recover

    recover(options.repository)
    hosted = share(options.repository, options.name, options.models, options.memory_mb)
    screen.print(f"{options.name} answers for {len(hosted)} models: {', '.join(hosted[:10])}")
    return 0
