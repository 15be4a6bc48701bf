"""Figures in docs/*.json, and the sentence that says how they were recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent.parent / "docs"


def read(name: str) -> Any:
    """Return the content of docs/NAME.json."""
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def recorded(command: str, name: str, figures: dict[str, Any], how: str = "") -> str:
    """Return the command, the day and the machine of the run that recorded docs/NAME.json, without a full stop."""
    when = f" on {figures['date']}" if "date" in figures else ""
    return (
        f"Recorded by `{command} --output docs/{name}.json`{how}{when} on {figures['cores']} cores of an "
        f"{figures['cpu']} ([figures](../{name}.json))"
    )
