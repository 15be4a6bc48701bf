"""`build-repo doctor`: what this machine can build and serve, and what to mend."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.markup import escape

from builder.commands import REPOSITORY, output, screen

if TYPE_CHECKING:
    from builder.serving.doctor import Finding


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(
        prog="build-repo doctor",
        description="Show what this machine can build and serve: processor, memory, GPUs, engines, the embedded "
        "Triton, extras, the Hub and folders, with advice on what needs mending. The exit status is 1 only "
        "if something stops every build.",
    )
    arguments.add_argument("--repository", **REPOSITORY)
    return arguments


def run(options: argparse.Namespace) -> int:
    with screen.status("examining this machine"):
        from builder.serving.doctor import examine

        findings = list(examine(options.repository))
    width = max(len(finding.subject) for finding in findings)
    for finding in findings:
        output.print(f"{_mark(finding)} {finding.subject:<{width}}  {escape(finding.found)}", soft_wrap=True)
        if finding.advice:
            output.print(f"  {'':<{width}}  → {escape(finding.advice)}", soft_wrap=True)
    stopping = [finding.subject for finding in findings if finding.stops]
    if stopping:
        screen.print(f"[bold red]no build works until this is mended:[/] {', '.join(stopping)}", soft_wrap=True)
        return 1
    return 0


def _mark(finding: Finding) -> str:
    if finding.stops:
        return "[red]✗[/]"
    if finding.advice:
        return "[yellow]![/]"
    return "[dim]-[/]" if finding.absent else "[green]✓[/]"
