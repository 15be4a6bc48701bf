"""Licence, base models and datasets of a checkpoint, from its card; nothing in the card is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

CARD = "README.md"
MAX_BYTES = 1 << 20  # of a card that are read
FIELDS = ("license", "license_link", "base_model", "datasets")


def read_card(folder: Path) -> dict[str, list[str]]:
    """Return the fields of FIELDS that the card in `folder` has, each as its texts; nothing if there is no card."""
    try:
        with (folder / CARD).open("rb") as stream:
            text = stream.read(MAX_BYTES).decode("utf-8", errors="replace")
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
