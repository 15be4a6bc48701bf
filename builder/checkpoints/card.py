"""The origin of a checkpoint from its card: its licence, what it was made from, and the data.

Knows the metadata at the head of a README.md of the Hub; trusts its author, and runs nothing of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

CARD = "README.md"
LONGEST = 1 << 20  # bytes that are read of it
FIELDS = ("license", "license_link", "base_model", "datasets")


def read_card(folder: Path) -> dict[str, list[str]]:
    """Return the fields of FIELDS that the card in `folder` has, each as its texts; nothing where there is no card."""
    try:
        with (folder / CARD).open("rb") as stream:
            text = stream.read(LONGEST).decode("utf-8", errors="replace")
        head = text.split("\n---", 1)[0].removeprefix("---") if text.startswith("---") else ""
        metadata = yaml.safe_load(head)
    except (OSError, RecursionError, ValueError, yaml.YAMLError):  # the Hub shows an invalid card as it is
        return {}
    if not isinstance(metadata, dict):
        return {}
    return {name: texts for name in FIELDS if (texts := _texts(metadata.get(name)))}


def _texts(value: Any) -> list[str]:
    entries = value if isinstance(value, list) else [value]
    return [text for text in entries if isinstance(text, str) and text and text.isprintable()]
