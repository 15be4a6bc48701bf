"""`build-repo remove`: take a model out of a repository."""

from __future__ import annotations

import argparse

from builder.commands import REPOSITORY, screen


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo remove",
        description="Remove all versions of a model from a repository, and its engine unless another calls it.",
    )
    add = arguments.add_argument
    add("name", help="name of the model")
    add("--repository", **REPOSITORY)
    add(
        "--url",
        metavar="HOST:PORT",
        help="gRPC address of a running server that is to unload it, when its last request is answered; it has to run "
        "with --model-control-mode=explicit, as build-repo serve does, on this repository",
    )
    return arguments


def run(options: argparse.Namespace) -> int:
    from builder.repository.transaction import recover
    from builder.repository.versions import remove
    from builder.serving.server.control import Control

    recover(options.repository)
    if options.url is None:
        removed, where = remove(options.repository, options.name), f"{options.repository}"
    else:
        with Control(options.url, options.repository) as control:
            control.versions(options.name)  # if no server answers, nothing is removed
            removed, where = remove(options.repository, options.name), f"{options.repository} and {options.url}"
            for model in removed:
                control.unload(model)
    screen.print(f"removed {' and '.join(removed)} from {where}")
    return 0
