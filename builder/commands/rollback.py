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
        action="append",
        metavar="HOST:PORT",
        help="gRPC address of a running server that is to serve it at once; it has to run with "
        "--model-control-mode=explicit, as build-repo serve does, on this repository. Several, separated by commas or "
        "given one by one, change together or not at all; dns:///NAME:PORT stands for all addresses of a name",
    )
    return arguments


def run(options: argparse.Namespace) -> int:
    from builder.repository.transaction import recover
    from builder.repository.versions import rollback, served_number
    from builder.serving.promotion.servers import Servers

    recover(options.repository)
    before = served_number(options.repository / options.name)
    where = str(options.repository)
    if not options.url:
        number = rollback(options.repository, options.name, options.version)
    else:
        with Servers(options.url, options.repository) as servers, servers.agreeing(options.name, before):
            number = rollback(options.repository, options.name, options.version)
            servers.switch(options.name)
            where = f"{where} and at {servers}"
    screen.print(f"{options.name}: version {number} is served from {where}")
    return 0
