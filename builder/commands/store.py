"""`build-repo store`: audit an object store, and remove what no version needs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from builder.commands import STORE_HELP, progress, screen
from builder.common.addresses import is_registry
from builder.common.errors import SpecError
from builder.repository.stores.store import Blob, open_store

MIN_AGE_HOURS = 24.0


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo store",
        description="Read all versions of an object store and compare every file with its hash, or remove the blobs "
        "that no version needs: of pushes that were interrupted, and of versions whose manifest was removed. Let no "
        "push run while blobs are removed.",
    )
    add = arguments.add_argument
    add("action", choices=("check", "collect"), help="check changes nothing; its exit status is 1 if a file is damaged")
    add("url", metavar="URL", help=STORE_HELP)
    add(
        "--min-age",
        type=float,
        metavar="HOURS",
        help=f"collect: age that a blob must have, because an interrupted push goes on from it "
        f"(default {MIN_AGE_HOURS:.0f})",
    )
    return arguments


def run(options: argparse.Namespace) -> int:
    if options.min_age is not None and (options.action != "collect" or options.min_age < 0):
        raise SpecError(f"--min-age {options.min_age} must be 0 or more, and is for `build-repo store collect`")
    from builder.repository.stores.audit import audit, collect

    if is_registry(options.url):
        raise SpecError(f"{options.url} is a registry, which checks and collects its own blobs; give an object store")
    store = open_store(options.url)
    if options.action == "collect":
        min_age = MIN_AGE_HOURS if options.min_age is None else options.min_age
        removed = collect(store, min_age * 3600)
        screen.print(f"{len(removed)} blobs removed, {_megabytes(removed)}", soft_wrap=True)
        return 0
    with progress(f"reading {options.url}") as show:
        result = audit(store, show)
    for problem in result.problems:
        print(problem)
    screen.print(
        f"{result.versions} versions, {len(result.problems)} problems; {len(result.unnamed)} blobs that no version "
        f"needs, {_megabytes(result.unnamed)}",
        soft_wrap=True,
    )
    return 1 if result.problems else 0


def _megabytes(blobs: Sequence[Blob]) -> str:
    return f"{sum(blob.size for blob in blobs) / 1e6:.1f} MB"
