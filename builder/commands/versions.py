"""`build-repo versions`: the versions of a model in a repository."""

from __future__ import annotations

import argparse
import time

from rich.table import Table

from builder.commands import REPOSITORY, screen_table


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo versions", description="Show the versions of a model, and which of them is served."
    )
    add = arguments.add_argument
    add("name", help="name of the model")
    add("--repository", **REPOSITORY)
    return arguments


def run(options: argparse.Namespace) -> int:
    from builder.repository.versions import newest_first

    table = Table(title=f"{options.name} in {options.repository}", title_justify="left")
    for column in ("version", "", "published", "variant", "MB", "quality", "revision", "Triton"):
        table.add_column(column, justify="right" if column in ("version", "MB", "quality") else "left")
    for version in newest_first(options.repository, options.name):
        report = version.report
        quality = next((variant.quality for variant in report.variants if variant.name == report.chosen), None)
        table.add_row(
            str(version.number),
            "served" if version.is_served else "",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(version.published)),
            report.chosen,
            f"{version.size / 1e6:.1f}",
            "-" if quality is None else f"{quality:.4f}",
            str(report.checkpoint.get("revision") or "-")[:12],
            report.triton,
            style="bold" if version.is_served else None,
        )
    screen_table(table)
    return 0
