"""`build-repo cache`: show the files that builds keep between runs, and make them smaller."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict

from rich.table import Table

from builder.commands import screen, screen_table
from builder.common.cache.entries import CacheEntries
from builder.common.cache.folder import (
    DEFAULT_MAX_GB,
    ENGINES,
    FOLDER_VARIABLE,
    LIMIT_VARIABLE,
    PROGRAMS,
    PUBLISHED,
    cache_home,
    folder_size,
    forget_removed,
    max_cache_bytes,
    prune_fetched,
)
from builder.common.errors import SpecError

TITLES = {
    ENGINES: "engines of releases",
    PROGRAMS: "fetched programs",
    "measured": "measurements",
    PUBLISHED: "repositories that were built",
}


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo cache",
        description="Show what builds and load tests keep between runs, or prune it. Whatever is gone is made or "
        "fetched again when it is needed. When a build ends, the stages that were not used for longest are removed "
        f"until the rest takes {DEFAULT_MAX_GB:.0f} GB, or a tenth of the disk where that is less; {LIMIT_VARIABLE} "
        f"states another limit, in 10^9 bytes. {FOLDER_VARIABLE} names another folder; {FOLDER_VARIABLE}=off keeps no "
        "stages.",
    )
    add = arguments.add_argument
    add("action", nargs="?", choices=("show", "prune"), default="show", help="default: show")
    add(
        "--max-gb",
        type=float,
        metavar="N",
        help="prune: what fetched programs, and then stages, may take, in 10^9 bytes; those that were not used for "
        "longest go first",
    )
    return arguments


def run(options: argparse.Namespace) -> int:
    if (options.action == "prune") != (options.max_gb is not None):
        raise SpecError(
            "--max-gb, how many 10^9 bytes may stay in the cache, is for `build-repo cache prune`, which needs it"
        )
    if options.max_gb is not None and options.max_gb < 0:
        raise SpecError(f"--max-gb {options.max_gb} is negative; expected 0 or more")
    entries = CacheEntries(cache_home())
    if options.action == "prune":
        programs, remaining = prune_fetched(round(options.max_gb * 1e9))
        removed = entries.prune(remaining)
        forget_removed()
        screen.print(f"{len(removed)} stages are gone, of {len({entry.model for entry in removed})} models")
        if programs:
            screen.print(f"gone too: {', '.join(programs)}")
    screen_table(_table(entries))
    return 0


def _table(entries: CacheEntries) -> Table:
    """Return one row per stage, and the other folders.

    Contents that stages share count in each; `all` counts them once.
    """
    home = cache_home()
    table = Table(title=f"{home}, stages of at most {max_cache_bytes() / 1e9:.1f} GB", title_justify="left")
    for column in ("", "kept", "MB", "last used", "saves, s"):
        table.add_column(column, justify="left" if column in ("", "last used") else "right")
    by_stage = defaultdict(list)
    for entry, used in entries.all():
        by_stage[entry.stage].append((entry, used))
    for stage, stored in by_stage.items():
        last = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(used for _, used in stored)))
        took = sum(entry.took for entry, _ in stored)
        table.add_row(stage, str(len(stored)), _mb(sum(entry.size for entry, _ in stored)), last, f"{took:.0f}")
    count = sum(map(len, by_stage.values()))
    table.add_row("all stages", str(count), _mb(folder_size(entries.blobs)), "", "", style="bold")
    for folder in sorted(path for path in home.glob("*") if path.is_dir()):
        if folder not in (entries.stages, entries.blobs):
            kept = str(len(list(folder.iterdir())))
            table.add_row(TITLES.get(folder.name, folder.name), kept, _mb(folder_size(folder)), "", "")
    return table


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"
