"""`build-repo push`: a version of a model from a repository to an object store."""

from __future__ import annotations

import argparse

from builder.commands import PLACE_HELP, REPOSITORY, progress, screen
from builder.repository.stores.opening import chosen_version, open_versions
from builder.repository.stores.transfer import push


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo push",
        description="Push a version of a model, with its engine, to an object store or an OCI registry. "
        "Only what the store lacks is sent.",
    )
    add = arguments.add_argument
    add("name", help="name of the model")
    add("--to", required=True, metavar="URL", help=PLACE_HELP)
    add("--version", type=int, metavar="N", help="default: the version that is served")
    add(
        "--verify",
        action="store_true",
        help="read what the store has of the version, compare it with its hashes, and send what is damaged",
    )
    add("--repository", **REPOSITORY)
    return arguments


def run(options: argparse.Namespace) -> int:
    version = chosen_version(options.to, options.version)
    with progress(f"pushing {options.name}") as show:
        pushed = push(options.repository, options.name, open_versions(options.to), version, options.verify, show)
    sizes = sum(blob.size for blob in pushed.manifest.files.values())
    screen.print(
        f"[green]✓[/] version {pushed.manifest.version} of {options.name} is in {options.to}: "
        f"{pushed.sent / 1e6:.1f} of {sizes / 1e6:.1f} MB sent",
        soft_wrap=True,
    )
    return 0
