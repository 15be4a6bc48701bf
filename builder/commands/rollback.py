"""`build-repo rollback`: have an earlier version of a model served, and a running server serve it."""

from __future__ import annotations

import argparse

from builder.commands import REPOSITORY, screen


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo rollback",
        description="Have another version of a model served, the one before the served version unless it is named: its "
        "files and its configuration.",
    )
    add = arguments.add_argument
    add("name", help="name of the model")
    add("version", nargs="?", type=int, metavar="VERSION", help="default: the one before")
    add("--repository", **REPOSITORY)
    add(
        "--url",
        metavar="HOST:PORT",
        help="gRPC address of a running server that is to serve it at once; it has to run with "
        "--model-control-mode=explicit, as build-repo serve does, on this repository",
    )
    return arguments


def run(options: argparse.Namespace) -> int:
    from builder.repository.transaction import recover
    from builder.repository.versions import rollback, served_number
    from builder.serving.server.control import Control

    recover(options.repository)
    before = served_number(options.repository / options.name)
    number = rollback(options.repository, options.name, options.version)
    if options.url is not None:
        with Control(options.url, options.repository) as control, control.agreeing(options.name, before):
            control.switch(options.name)
    where = options.repository if options.url is None else f"{options.repository} and at {options.url}"
    screen.print(f"{options.name}: version {number} is served from {where}")
    return 0
