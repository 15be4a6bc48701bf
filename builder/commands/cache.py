"""`build-repo cache`: what builds keep between runs, and how it is made smaller."""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path

from rich.table import Table

from builder.cache.entries import Entries
from builder.cache.folder import MOST, MOST_GB, VARIABLE, cache_home, most_kept
from builder.cache.published import forget_removed
from builder.commands import screen, screen_table
from builder.errors import SpecError


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo cache",
        description="Show what builds keep between runs, stage by stage, or prune it. Whatever is gone is made again "
        "when it is needed. When a build ends, the stages that were not used for longest are removed until the rest "
        f"takes {MOST_GB:.0f} GB, or a tenth of the disk where that is less; {MOST} states another limit, in 10^9 "
        f"bytes. {VARIABLE} names another folder; {VARIABLE}=off keeps no stages.",
    )
    arguments.add_argument("action", nargs="?", choices=("show", "prune"), default="show", help="default: show")
    arguments.add_argument(
        "--max-gb",
        type=float,
        metavar="N",
        help="prune: what stages may take, in 10^9 bytes; those that were not used for longest go first",
    )
    return arguments


def run(options: argparse.Namespace) -> int:
    if (options.action == "prune") != (options.max_gb is not None):
        raise SpecError(
            "--max-gb, how many 10^9 bytes may stay in the cache, is for `build-repo cache prune`, which needs it"
        )
    if options.max_gb is not None and options.max_gb < 0:
        raise SpecError(f"--max-gb {options.max_gb} is negative; expected 0 or more")
    entries = Entries(cache_home())
    if options.action == "prune":
        gone = entries.prune(round(options.max_gb * 1e9))
        forget_removed()
        screen.print(f"{len(gone)} stages are gone, of {len({entry.model for entry in gone})} models", highlight=False)
    screen_table(_table(entries))
    return 0


def _table(entries: Entries) -> Table:
    """One row a stage, and the other folders. Contents that stages share count in each; `all` counts them once."""
    home = cache_home()
    table = Table(title=f"{home}, stages of at most {most_kept() / 1e9:.1f} GB", title_justify="left")
    for column in ("", "kept", "MB", "last used", "saves, s"):
        table.add_column(column, justify="left" if column in ("", "last used") else "right")
    by_stage = defaultdict(list)
    for entry, used in entries.all():
        by_stage[entry.stage].append((entry, used))
    for stage, stored in by_stage.items():
        last = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(used for _, used in stored)))
        took = sum(entry.took for entry, _ in stored)
        table.add_row(stage, str(len(stored)), _mb(sum(entry.size for entry, _ in stored)), last, f"{took:.0f}")
    table.add_row("all stages", str(sum(map(len, by_stage.values()))), _mb(_size(entries.blobs)), "", "", style="bold")
    for name, what in (("runtimes", "engines of releases"), ("measured", "measurements"), ("digests", "digests")):
        if (home / name).is_dir():
            table.add_row(what, str(len(list((home / name).iterdir()))), _mb(_size(home / name)), "", "")
    return table


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"
