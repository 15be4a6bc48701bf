"""`build-repo card NAME`: a model card of a served model, in Markdown."""

from __future__ import annotations

import argparse
from pathlib import Path

from builder.commands import REPOSITORY, screen
from builder.common.files import write_output


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo card",
        description="Write a model card: what the model is, its measured quality and speed, its licence and where it "
        "comes from, with the metadata that the Hub reads.",
    )
    add = arguments.add_argument
    add("name", help="name of a model in the repository")
    add("--repository", **REPOSITORY)
    add("-o", "--output", type=Path, metavar="FILE", help="file to write (default: the card goes to standard output)")
    return arguments


def run(options: argparse.Namespace) -> int:
    from builder.repository.report.card import model_card
    from builder.repository.report.evaluations import read_evaluations
    from builder.repository.report.record import read_report
    from builder.repository.signing_keys import SIGNATURE

    report = read_report(options.repository, options.name)
    signed = (options.repository / options.name / str(report.version) / SIGNATURE).is_file()
    card = model_card(report, read_evaluations(options.repository, report), signed)
    if options.output is None:
        print(card, end="")
    else:
        write_output(options.output, card, "choose another with --output")
        screen.print(f"wrote {options.output}")
    return 0
