"""`build-repo report NAME`: the measurements of a build, as a table and as a page for the browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from builder.commands import DEFAULT_REPOSITORY, REPOSITORY_HELP, screen, screen_table
from builder.common.errors import RepositoryError


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo report", description="Show what a build measured, as a table and as one HTML page."
    )
    arguments.add_argument("name", help="name of a model in the repository")
    arguments.add_argument("--repository", type=Path, default=DEFAULT_REPOSITORY, help=REPOSITORY_HELP)
    arguments.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="file for the HTML page (default NAME/report.html in the repository)",
    )
    return arguments


def run(options: argparse.Namespace) -> int:
    from builder.repository.report.page import PAGE, page
    from builder.repository.report.record import read_report

    report = read_report(options.repository, options.name)
    screen_table(report.table())
    if report.choice:
        Console().print(report.choice, highlight=False)
    output = options.output or options.repository / options.name / PAGE
    try:
        output.write_text(page(report), "utf-8")
    except OSError as error:
        raise RepositoryError(f"{output} cannot be written ({error.strerror}); choose another with --output") from error
    screen.print(f"wrote {output}", highlight=False)
    return 0
