"""`build-repo unshare`: give encoders of a shared front a front of their own again."""

from __future__ import annotations

import argparse

from builder.commands import screen
from builder.commands.share import front_parser


def parser() -> argparse.ArgumentParser:
    arguments = front_parser(
        "unshare",
        "Move encoders out of a shared front, with all their versions: Triton loads each by its own name again.",
        models=("+", "names of encoders that the shared front hosts"),
        name="name of the shared front",
    )
    return arguments


def run(options: argparse.Namespace) -> int:
    from builder.repository.sharing.share import unshare
    from builder.repository.transaction import recover

    recover(options.repository)
    left = unshare(options.repository, options.name, options.models)
    screen.print(
        f"{', '.join(dict.fromkeys(options.models))} left {options.name}, which answers for {len(left)} models"
    )
    return 0
