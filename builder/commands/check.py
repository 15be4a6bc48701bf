"""`build-repo check`: lint a repository without a server."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from builder.commands import REPOSITORY, VERIFY_KEY_HELP, screen
from builder.common.errors import SpecError
from builder.common.releases import RELEASES
from builder.repository.check import verdicts
from builder.repository.lint import lint
from builder.repository.lint.findings import Finding, Severity
from builder.repository.lint.formats import FORMATS
from builder.repository.lint.pbtxt import fix
from builder.repository.transaction import recover

TEXT = "text"
MARKS = {Severity.ERROR: "[red]✗[/]", Severity.WARNING: "[yellow]![/]"}


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo check",
        description="Check any repository without starting a server: find what Triton refuses to load, and what it "
        "loads but does not do as intended. The exit status is 1 if there is an error, 0 if there are only warnings.",
    )
    add = arguments.add_argument
    add("repository", nargs="?", **REPOSITORY)
    add(
        "--triton",
        metavar="RELEASE",
        help="Triton release to check against (default: the one that each model was built for)",
    )
    add("--fix", action="store_true", help="first mend in config.pbtxt what can be mended without a decision")
    add(
        "--format",
        choices=(TEXT, *FORMATS),
        default=TEXT,
        help="how findings are written: as text for people (default), or for a program, on standard output",
    )
    add("--verify-key", type=Path, metavar="FILE", help=f"verify signatures: {VERIFY_KEY_HELP}")
    return arguments


def run(options: argparse.Namespace) -> int:
    if options.triton is not None and options.triton not in RELEASES:
        raise SpecError(f"Triton {options.triton} is not known; known are {', '.join(RELEASES)}")
    for name in recover(options.repository):
        screen.print(f"{name}: an interrupted build was undone")
    findings = lint(options.repository, options.triton, options.verify_key)
    if options.fix:
        for line in fix(options.repository, findings):
            screen.print(f"[green]✎[/] {escape(line)}", soft_wrap=True)
        findings = lint(options.repository, options.triton, options.verify_key)
    if options.format == TEXT:
        _show(options.repository, findings)
    else:
        print(FORMATS[options.format](options.repository, findings))
    return int(any(finding.severity is Severity.ERROR for finding in findings))


def _show(repository: Path, findings: Sequence[Finding]) -> None:
    for finding in sorted(findings, key=lambda finding: finding.severity):
        location = finding.file if finding.line is None else f"{finding.file}:{finding.line}"
        source = escape(", ".join(filter(None, (finding.code, location))))  # a repository's own finding has no file
        text = f"{MARKS[finding.severity]} {escape(str(finding))} [dim]({source})[/]"
        screen.print(text, soft_wrap=True)
    for name, verdict in verdicts(repository).items():
        screen.print(f"  {name}: {escape(verdict)}", soft_wrap=True)
    if not any(finding.severity is Severity.ERROR for finding in findings):
        found = "no error found" if findings else "no problem found"
        screen.print(f"[green]✓[/] {repository}: {found}")
