"""Circumstances that every file of figures begins with: the day, the machine and the versions of a measurement."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

from builder.common.machine import available_cores, cpu
from builder.repository.report.record import package_versions


def circumstances() -> dict[str, Any]:
    """Return the day, the cores that may be used, the processor's name, and the versions of this project's packages."""
    return {
        "date": date.today().isoformat(),
        "cores": available_cores(),
        "cpu": cpu()["model"],
        "versions": package_versions(),
    }


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    """Merge `figures` as JSON into the file at any depth; the rest of the file stays.

    A table can so be measured in several runs of a few minutes.
    """
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(_merged(known, figures), indent=1) + "\n", "utf-8")


def refuse_other(path: Path | None, **facts: Any) -> None:
    """Raise SystemExit if the figures in `path` were measured on something else: they do not belong in one table."""
    known = json.loads(path.read_text("utf-8")) if path is not None and path.exists() else {}
    for name, wanted in facts.items():
        if known.get(name, wanted) != wanted:
            raise SystemExit(
                f"{path} has figures of {name} {known[name]!r}, and these are of {wanted!r}: name another file"
            )


def _merged(known: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {name: _merged(known[name], new[name]) for name in new if isinstance(known.get(name), dict)}
    return {**known, **new, **both}
