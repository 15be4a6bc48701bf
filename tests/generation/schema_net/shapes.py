"""Schemas with the shapes of JSONSchemaBench (https://arxiv.org/abs/2501.10868), from real projects if they are here.

Kubernetes' objects come from kubernetes-validate, those of JSON Schema Store from check-jsonschema; those of Snowplow,
of GitHub's repositories and of function calls are written like theirs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import check_jsonschema
import kubernetes_validate

from builder.runtime.generation.guides import MAX_GUIDE_LENGTH
from builder.serving.gateway.generation.tool_calling import Tool, call_schema

KUBERNETES = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
STORE = Path(check_jsonschema.__file__).parent / "builtin_schemas" / "vendor"
REFERENCE = re.compile(r'"#/(definitions|\$defs)/([^"]+)"')


def shapes() -> dict[str, list[Any]]:
    """Return schemas by the origin of their shape."""
    return {
        "Kubernetes": list(_kubernetes()),
        "JSON Schema Store": list(_store()),
        "Snowplow": list(_snowplow()),
        "GitHub": GITHUB,
        "function calls": list(_calls()),
    }


def _kubernetes() -> Iterator[Any]:
    """Yield every object of the newest version that defines it, with the objects that it refers to."""
    newest = max(KUBERNETES.glob("v*-local"), key=lambda folder: int(folder.name.split(".")[1]))
    yield from _parts(json.loads((newest / "_definitions.json").read_text("utf-8")))


def _store() -> Iterator[Any]:
    """Yield complete schemas and each of their definitions."""
    for file in sorted(STORE.glob("*.json")):
        document = json.loads(file.read_text("utf-8"))
        if len(json.dumps(document)) <= MAX_GUIDE_LENGTH:
            yield document
        yield from _parts(document)


def _parts(document: Mapping[str, Any]) -> Iterator[Any]:
    """Yield a schema of each definition, with the definitions that it refers to, unless it is too large for a guide."""
    for group in ("definitions", "$defs"):
        for name in document.get(group, {}):
            reached, fresh = {name}, [name]
            while fresh:
                text = json.dumps(document[group][fresh.pop()])
                found = {other for _, other in REFERENCE.findall(text) if other in document[group]} - reached
                reached |= found
                fresh += found
            schema = {"$ref": f"#/{group}/{name}", group: {key: document[group][key] for key in sorted(reached)}}
            schema |= {"$schema": document["$schema"]} if "$schema" in document else {}
            if len(json.dumps(schema)) <= MAX_GUIDE_LENGTH:
                yield schema


def _snowplow() -> Iterator[Any]:
    """Yield self-describing schemas of events: flat, closed, with lengths and limits everywhere."""
    text, count = {"type": "string", "maxLength": 8}, {"type": "integer", "minimum": 0, "maximum": 2147483647}
    fields: dict[str, Any] = {
        "eventId": {"type": "string", "format": "uuid"},
        "occurredAt": {"type": "string", "format": "date-time"},
        "name": {**text, "minLength": 1},
        "price": {"type": ["number", "null"], "minimum": 0, "maximum": 1e9, "multipleOf": 0.01},
        "quantity": count,
        "latitude": {"type": "number", "minimum": -90, "maximum": 90},
        "currency": {"type": "string", "pattern": "^[A-Z]{3}$"},
        "kind": {"enum": ["click", "view", None]},
        "total": {"type": ["integer", "null"], "minimum": -(2**63), "maximum": 2**63 - 1},
        "address": {"type": ["string", "null"], "format": "ipv4"},
        "ratio": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        "labels": {"type": "array", "items": text, "minItems": 1, "maxItems": 3},
    }
    names = list(fields)
    for start in range(len(names)):
        chosen = (names[start:] + names[:start])[:5]
        schema = {
            "self": {"vendor": "com.example", "name": chosen[0], "format": "jsonschema", "version": "1-0-0"},
            "type": "object",
            "properties": {name: fields[name] for name in chosen},
            "required": chosen[:2],
            "additionalProperties": False,
        }
        yield schema
        if not start:
            yield {"$schema": "http://iglucentral.com/schemas/com.snowplowanalytics.self-desc/schema/1-0-0#", **schema}


def _calls() -> Iterator[Any]:
    """Yield the schemas of required tool calls, of one function and of several."""
    parameters: dict[str, dict[str, Any]] = {
        "weather": {"city": {"type": "string", "maxLength": 9}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "search": {"query": {"type": "string"}, "limit": {"type": "integer", "minimum": 1, "maximum": 50}},
        "transfer": {"amount": {"type": "number", "exclusiveMinimum": 0}, "currency": {"const": "EUR"}},
        "book": {
            "date": {"type": "string", "format": "date"},
            "guests": {"type": "array", "items": {"$ref": "#/$defs/guest"}, "maxItems": 2},
            "breakfast": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
        "nothing": {},
    }
    guest = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}, "required": ["age"]}
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": _parameters(fields, guest)}})
        for name, fields in parameters.items()
    ]
    yield call_schema(tools, "required")
    for name in parameters:
        yield call_schema(tools, {"type": "function", "function": {"name": name}})


def _parameters(fields: Mapping[str, Any], guest: Mapping[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": fields, "required": list(fields)[:1]}
    return {**schema, "$defs": {"guest": guest}} if "guests" in fields else schema


GITHUB: list[Any] = [
    {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "id": "http://example.com/package.json#",
        "type": "object",
        "definitions": {
            "person": {
                "type": ["object", "string"],
                "required": ["name"],
                "properties": {"name": {"type": "string"}, "email": {"type": "string", "format": "email"}},
            },
            "dependency": {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^[~^]?\d+\.\d+$"}},
        },
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 14, "pattern": r"^[a-z0-9-~][a-z0-9-._~]*$"},
            "author": {"$ref": "#/definitions/person"},
            "dependencies": {"$ref": "#/definitions/dependency"},
            "engines": {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string"}},
        },
        "required": ["name"],
    },
    {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "number",
        "minimum": 0,
        "exclusiveMinimum": True,
        "maximum": 0.5,
    },
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "type": {"const": "FeatureCollection"},
            "features": {"type": "array", "items": {"$ref": "#/definitions/feature"}, "maxItems": 2},
            "bbox": {"type": "array", "minItems": 4, "maxItems": 4, "items": {"type": "number"}},
        },
        "definitions": {
            "position": {"type": "array", "minItems": 2, "items": [{"type": "number"}, {"type": "number"}]},
            "feature": {
                "type": "object",
                "required": ["type", "geometry", "properties"],
                "properties": {
                    "type": {"enum": ["Feature"]},
                    "geometry": {
                        "oneOf": [
                            {"type": "null"},
                            {
                                "type": "object",
                                "required": ["type", "coordinates"],
                                "properties": {
                                    "type": {"enum": ["Point"]},
                                    "coordinates": {"$ref": "#/definitions/position"},
                                },
                            },
                        ]
                    },
                    "properties": {"oneOf": [{"type": "null"}, {"type": "object"}]},
                },
            },
        },
        "required": ["type", "features"],
    },
    {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "format": "int64"},
            "status": {"type": "string", "enum": ["available", "pending", "sold"]},
            "tags": {"type": "array", "items": {"type": "object", "properties": {"id": {"type": "integer"}}}},
            "photoUrls": {"type": "array", "items": {"type": "string", "format": "uri"}, "maxItems": 2},
            "price": {"type": "number", "format": "double", "maximum": 1.7976931348623157e308},
        },
        "required": ["id", "photoUrls", "price"],
    },
    {
        "type": "object",
        "properties": {
            "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
            "value": {"type": "number"},
        },
        "required": ["value"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "patternProperties": {"^[a-z]{1,8}$": {"type": ["string", "number", "boolean"]}},
        "minProperties": 1,
        "additionalProperties": False,
    },
    {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "string"}}, "maxProperties": 3},
    {
        "allOf": [{"$ref": "#/definitions/base"}, {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}],
        "definitions": {"base": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    },
]
