"""`build-repo report NAME`: the measurements of a build, as a table and as a page for the browser."""

from __future__ import annotations

import argparse
from pathlib import Path

from builder.commands import REPOSITORY, output, screen, screen_table
from builder.common.files import write_output


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo report", description="Show what a build measured, as a table and as one HTML page."
    )
    add = arguments.add_argument
    add("name", help="name of a model in the repository")
    add("--repository", **REPOSITORY)
    add(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="file for the HTML page (default NAME/report.html in the repository)",
    )
    return arguments


def run(options: argparse.Namespace) -> int:
    from builder.repository.report.evaluations import read_evaluations
    from builder.repository.report.page import PAGE, page
    from builder.repository.report.record import read_report

    report = read_report(options.repository, options.name)
    screen_table(report.table())
    if report.choice:
        output.print(report.choice)
    for record in read_evaluations(options.repository, report):
        screen_table(record.table())
    file = options.output or options.repository / options.name / PAGE
    write_output(file, page(report), "choose another with --output")
    screen.print(f"wrote {file}")
    return 0
