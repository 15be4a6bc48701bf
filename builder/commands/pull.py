"""`build-repo pull`: a version of a model from an object store into a repository."""

from __future__ import annotations

import argparse
from pathlib import Path

from builder.commands import PLACE_HELP, REPOSITORY, VERIFY_KEY_HELP, count, progress, screen
from builder.common.addresses import split_version
from builder.common.errors import SpecError
from builder.options.choices import KEEP
from builder.repository.stores.opening import VersionStore, chosen_version, open_versions


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo pull",
        description="Bring a version of a model, with its engine, from an object store or an OCI registry and have "
        "it served. What is here already is not fetched, and a pull that was interrupted goes on where it stopped.",
    )
    add = arguments.add_argument
    add("name", nargs="+", help="a model of the store; NAME@N is its version N")
    add("--from", dest="store", required=True, metavar="URL", help=PLACE_HELP)
    add("--version", type=int, metavar="N", help="of each model that names none itself (default: the newest)")
    add("--repository", **REPOSITORY)
    add(
        "--keep", type=count, default=KEEP, metavar="N", help=f"versions that remain in the repository (default {KEEP})"
    )
    add("--verify-key", type=Path, metavar="FILE", help=f"take only what was signed: {VERIFY_KEY_HELP}")
    add(
        "--without-weights",
        action="store_true",
        help="fetch configurations and reports alone, for a gateway with --load-on-demand; all other files are empty, "
        "with their size, so that no Triton can load them",
    )
    return arguments


def run(options: argparse.Namespace) -> int:
    if options.without_weights and options.verify_key is not None:
        raise SpecError("--verify-key reads all files, and --without-weights leaves some out: leave out one of them")
    fetch, state = (_describe, "described") if options.without_weights else (_pull, "served")
    store = open_versions(options.store)
    for name, version in map(split_version, options.name):
        number, fetched = fetch(store, name, chosen_version(options.store, version or options.version), options)
        screen.print(
            f"[green]✓[/] version {number} of {name} is {state} in {options.repository}: "
            f"{fetched / 1e6:.1f} MB fetched",
            soft_wrap=True,
        )
    return 0


def _pull(store: VersionStore, name: str, version: int | None, options: argparse.Namespace) -> tuple[int, int]:
    """Pull a version whole. Return its number and the bytes that were fetched. Raises RepositoryError."""
    with screen.status("loading what checks a repository"):
        from builder.repository.stores.transfer import pull
    with progress(f"pulling {name}") as show:
        pulled = pull(store, name, options.repository, version, options.keep, options.verify_key, show)
    return pulled.manifest.version, pulled.fetched


def _describe(store: VersionStore, name: str, version: int | None, options: argparse.Namespace) -> tuple[int, int]:
    """Pull a version without its weights. Return its number and the bytes that were fetched. Raises RepositoryError."""
    from builder.repository.stores.description import fetch_description

    manifest = store.manifest(name, version)
    return manifest.version, fetch_description(manifest, store, options.repository)
