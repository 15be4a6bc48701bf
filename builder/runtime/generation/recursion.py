"""Find schemas that require themselves: their answers would never end, and llguidance would fail within one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from ..fields import InputError
from .json_schemas import pointer, subschemas


def refuse_endless_documents(schema: "Mapping[str, Any]") -> None:
    """Raise InputError if no finite document is valid under a part of `schema`."""
    open_parts = dict(subschemas(schema))
    while open_parts:
        settled = [place for place, part in open_parts.items() if _is_finite(place, part, open_parts)]
        if not settled:
            raise InputError(
                f"guide is refused: {min(open_parts)} of the schema needs itself, directly or through $ref, so that no "
                "document of it ends; make what refers back optional"
            )
        for place in settled:
            del open_parts[place]


def _is_finite(place: str, schema: "Mapping[str, Any]", open_parts: "Mapping[str, Any]") -> bool:
    """Return True if a finite document is valid here, assuming none for the schemas at `open_parts`."""
    if "const" in schema or "enum" in schema:
        return True
    every = [f"{place}/allOf/{number}" for number, _ in enumerate(_list(schema, "allOf"))]
    if isinstance(schema.get("$ref"), str):
        every.append(unquote(schema["$ref"]))
    if any(other in open_parts for other in every):
        return False
    for name in ("anyOf", "oneOf"):
        options = [f"{place}/{name}/{number}" for number, part in enumerate(_list(schema, name)) if part is not False]
        if options and all(option in open_parts for option in options):
            return False
    kinds = schema.get("type", "any")
    needed = {"array": _items, "object": _properties}
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in needed or not any(other in open_parts for other in needed[kind](place, schema)):
            return True
    return False


def _items(place: str, schema: "Mapping[str, Any]") -> "Iterator[str]":
    """Yield the places of the schemas of items that an array must have."""
    count, first = schema.get("minItems", 0), len(_list(schema, "prefixItems"))
    if isinstance(count, int):
        yield from (f"{place}/prefixItems/{number}" for number in range(min(count, first)))
        if count > first:
            yield f"{place}/items"


def _properties(place: str, schema: "Mapping[str, Any]") -> "Iterator[str]":
    """Yield the places of the schemas of properties that an object must have."""
    named = schema.get("properties")
    for name in _list(schema, "required"):
        if isinstance(named, dict) and name in named:
            yield f"{place}/properties/{pointer(name)}"
        elif not schema.get("patternProperties"):
            yield f"{place}/additionalProperties"


def _list(schema: "Mapping[str, Any]", name: str) -> "Sequence[Any]":
    value = schema.get(name, [])
    return value if isinstance(value, list) else []
