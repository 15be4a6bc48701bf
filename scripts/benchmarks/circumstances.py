"""Circumstances that every file of figures begins with: the day, the machine and the versions of a measurement."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

from builder.common.machine import available_cores, cpu
from builder.repository.report.record import package_versions


def circumstances() -> dict[str, Any]:
    """Return the day, the usable cores, the processor's name and instruction sets, and this project's packages.

    Virtual machines give processors with and without AMX the same name.
    """
    processor = cpu()
    return {
        "date": date.today().isoformat(),
        "cores": available_cores(),
        "cpu": processor["model"],
        "instructions": processor["flags"],
        "versions": package_versions(),
    }


def replace_figures(path: Path | None, figures: dict[str, Any]) -> None:
    """Write `figures` as JSON into the file, if one is given."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


def report_figures(path: Path | None, figures: dict[str, Any]) -> None:
    """Print `figures` as JSON, and write them into the file, if one is given."""
    print(json.dumps(figures, indent=1))
    replace_figures(path, figures)


def write_figures(path: Path | None, figures: dict[str, Any]) -> None:
    """Merge `figures` as JSON into the file, if one is given: objects at any depth, while lists replace.

    The rest of the file stays, so that a table can be measured in several runs of a few minutes.
    """
    if path is not None:
        known = json.loads(path.read_text("utf-8")) if path.exists() else {}
        replace_figures(path, _merged(known, figures))


def refuse_other(path: Path | None, **facts: Any) -> None:
    """Raise SystemExit if the figures in `path` were measured on something else, or on something that it does not name.

    They do not belong in one table.
    """
    if path is None or not path.exists():
        return
    known = json.loads(path.read_text("utf-8"))
    for name, wanted in facts.items():
        if known.get(name) != wanted:
            raise SystemExit(
                f"{path} has figures of {name} {known.get(name)!r}, and these are of {wanted!r}: name another file"
            )


def refuse_other_machine(path: Path | None, machine: dict[str, Any]) -> None:
    """Raise SystemExit if the figures in `path` were measured on another machine or with other packages."""
    refuse_other(path, **{name: machine[name] for name in ("cpu", "cores", "instructions", "versions")})


def _merged(known: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {
        name: _merged(known[name], value)
        for name, value in new.items()
        if isinstance(value, dict) and isinstance(known.get(name), dict)
    }
    return {**known, **new, **both}
