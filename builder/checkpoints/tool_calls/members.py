"""Read the members of a JSON object without rewriting them: 1.50 stays 1.50, and 1e999 does not become Infinity."""

from __future__ import annotations

import json
import re
from typing import Any

SPACES = re.compile(r"[ \t\r\n]*")


def member_texts(text: str) -> dict[str, str]:
    """Return the values of a JSON object by their names, as they are written. Raises ValueError for any other text."""
    decoder = json.JSONDecoder(parse_constant=_refuse)
    if not isinstance(decoder.decode(text), dict):
        raise ValueError("the value is not an object")
    texts: dict[str, str] = {}
    place = _skip(text, text.index("{") + 1)
    while text[place] != "}":
        name, place = decoder.raw_decode(text, place)
        place = _skip(text, text.index(":", place) + 1)
        _, end = decoder.raw_decode(text, place)
        texts[name] = text[place:end]
        place = _skip(text, end)
        if text[place] == ",":
            place = _skip(text, place + 1)
    return texts


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _skip(text: str, place: int) -> int:
    match = SPACES.match(text, place)
    return place if match is None else match.end()
