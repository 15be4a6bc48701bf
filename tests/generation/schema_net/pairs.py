"""Every pair of keywords of draft 2020-12, with values of each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

SCHEMA: Any = {"type": "string", "maxLength": 3}
KEYWORDS: dict[str, tuple[Any, ...]] = {
    "$id": ("https://example.com/schema",),
    "$schema": ("https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"),
    "$ref": ("#/$defs/number", "#/$defs/node"),
    "$anchor": ("here",),
    "$dynamicRef": ("#here",),
    "$dynamicAnchor": ("here",),
    "$vocabulary": ({"https://json-schema.org/draft/2020-12/vocab/core": True},),
    "$comment": ("a comment",),
    "$defs": ({"other": {"type": "boolean"}},),
    "allOf": ([{"type": ["number", "object", "string"]}, {"minimum": 2}], [{"required": ["a"]}, {"multipleOf": 2}]),
    "anyOf": ([{"type": "integer"}, {"type": "object"}], [{"maximum": 0.5}, {"minItems": 1}]),
    "oneOf": ([{"type": "number"}, {"type": "string"}], [{"type": "array"}, {"const": "x"}, {"type": "object"}]),
    "not": ({"type": "null"},),
    "if": ({"type": "integer"},),
    "then": ({"minimum": 3},),
    "else": ({"maxLength": 2},),
    "dependentSchemas": ({"a": {"required": ["b"]}},),
    "prefixItems": ([{"type": "integer"}, SCHEMA], [True]),
    "items": (SCHEMA, False, {"type": "array", "maxItems": 1}),
    "contains": ({"type": "integer"},),
    "properties": ({"a": {"type": "integer"}, "b": SCHEMA}, {"ab": {"exclusiveMinimum": 0, "maximum": 0.5}}),
    "patternProperties": ({"^a": {"type": "integer"}}, {"b$": {"type": "boolean"}, "^x": False}),
    "additionalProperties": (False, {"type": "boolean"}, SCHEMA),
    "propertyNames": ({"maxLength": 2},),
    "unevaluatedItems": (False,),
    "unevaluatedProperties": (False,),
    "type": ("object", "array", "string", "number", "integer", ["integer", "string"], ["object", "array", "number"]),
    "enum": ([1, "a", None, [1], {"a": 1}], [2.5, 4, "2024-02-29"]),
    "const": (4, "ab", {"a": 1, "b": "x"}, 0.1, [1, "x"]),
    "multipleOf": (3, 0.25),
    "maximum": (0.5, 100, -2),
    "exclusiveMaximum": (1, 0),
    "minimum": (0, -0.75, 12),
    "exclusiveMinimum": (0, 1.5),
    "maxLength": (2, 0),
    "minLength": (1, 3),
    "pattern": ("^[a-c]+$", "b", "^a|b$"),
    "maxItems": (2, 0),
    "minItems": (1, 3),
    "uniqueItems": (True, False),
    "maxContains": (2,),
    "minContains": (1,),
    "maxProperties": (1, 2),
    "minProperties": (1, 2),
    "required": (["a"], ["a", "b", "c"]),
    "dependentRequired": ({"a": ["b"]},),
    "title": ("a title",),
    "description": ("a description",),
    "default": (3,),
    "deprecated": (True,),
    "readOnly": (True,),
    "writeOnly": (True,),
    "examples": ([1],),
    "format": ("date", "date-time", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "regex"),
    "contentEncoding": ("base64",),
    "contentMediaType": ("application/json",),
    "contentSchema": ({"type": "object"},),
}
DEFINITIONS: dict[str, Any] = {
    "number": {"type": "number"},
    "node": {"type": "object", "properties": {"a": {"$ref": "#/$defs/node"}, "b": {"type": "integer"}}},
}


FAMILIES = {  # keywords that apply to one type only
    "number": ("multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"),
    "string": ("maxLength", "minLength", "pattern", "format"),
    "array": ("prefixItems", "items", "contains", "maxItems", "minItems", "uniqueItems", "unevaluatedItems"),
    "object": (
        *("properties", "patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties"),
        *("maxProperties", "minProperties", "required", "dependentRequired", "dependentSchemas"),
    ),
}
TYPES = {keyword: kind for kind, keywords in FAMILIES.items() for keyword in keywords}


def pairs(values: int) -> Iterator[dict[str, Any]]:
    """Yield up to `values` schemas of each pair of keywords, in alternating order, with and without a type."""
    for first, second in itertools.combinations(KEYWORDS, 2):
        choices = list(itertools.product(KEYWORDS[first], KEYWORDS[second]))
        stride = max(1, len(choices) // values)
        for number, (one, other) in enumerate(choices[::stride][:values]):
            pair = [(first, one), (second, other)]
            schema = _with_definitions(dict(pair if number % 2 else reversed(pair)))
            yield schema
            kind = TYPES.get(first, TYPES.get(second))
            if kind is not None and "type" not in schema:
                yield {"type": kind, **schema}


def _with_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        return {**schema, "$defs": {**schema.get("$defs", {}), **DEFINITIONS}}
    return schema
