"""Requests that an OpenAPI document nearly allows: some fields of another type, some missing, some too many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

NUMBERS = st.one_of(st.integers(), st.integers(-(2**80), 2**80), st.floats(allow_nan=False, allow_infinity=False))
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(st.characters(), max_size=20)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
MOST = 3  # of a list, where it may be long
LONG = {"max_tokens": 8, "max_completion_tokens": 8, "max_length": 8}  # fields that would take a model's time


@dataclass(frozen=True)
class Sent:
    """A path, and a body."""

    path: str
    body: Any


def requests(document: Mapping[str, Any], models: Sequence[str], tasks: Sequence[str]) -> st.SearchStrategy[Sent]:
    """Return requests of every route of `document` that takes a body; `models` and `tasks` are existing names."""
    components = document["components"]["schemas"]
    names = sorted({name for schema in _objects(document) for name in schema["properties"]})

    @st.composite
    def one(draw: st.DrawFn) -> Sent:
        path = draw(st.sampled_from(sorted(p for p, operations in document["paths"].items() if "post" in operations)))
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        body = draw(_valid(content["schema"], components))
        if "model" in body:
            body["model"] = draw(st.sampled_from(models) | st.text(max_size=3))
        for name, most in LONG.items():
            if isinstance(body.get(name), int):
                body[name] = min(body[name], most)
        body |= draw(st.dictionaries(st.sampled_from(names) | st.text(max_size=4), ANYTHING, max_size=2))
        for name in draw(st.sets(st.sampled_from(sorted(body)), max_size=1)) if body else ():
            del body[name]
        path = path.replace("{task}", draw(st.sampled_from(tasks)))
        return Sent(path.replace("{name}", draw(st.sampled_from(models))), body)

    return one()


def _objects(node: Any) -> list[Mapping[str, Any]]:
    """Return every schema in a document that has properties."""
    children = node.values() if isinstance(node, Mapping) else node if isinstance(node, list) else ()
    result = [schema for child in children for schema in _objects(child)]
    return [node, *result] if isinstance(node, Mapping) and isinstance(node.get("properties"), Mapping) else result


def _valid(schema: Mapping[str, Any], components: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Return values that are valid under pydantic's part of JSON Schema."""
    if "$ref" in schema:
        return _valid(components[schema["$ref"].rsplit("/", 1)[1]], components)
    if "anyOf" in schema:
        return st.one_of([_valid(part, components) for part in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    kinds: dict[str, Any] = {
        "null": st.none,
        "boolean": st.booleans,
        "string": lambda: st.text(st.characters(), min_size=1, max_size=20),
        "integer": lambda: st.integers(schema.get("minimum", -(2**40)), schema.get("maximum", 2**40)),
        "number": lambda: st.floats(schema.get("minimum", -1e6), schema.get("maximum", 1e6)),
        "array": lambda: st.lists(
            _valid(schema.get("items", {}), components), min_size=schema.get("minItems", 0), max_size=MOST
        ),
        "object": lambda: _object(schema, components),
    }
    return kinds[schema["type"]]() if "type" in schema else ANYTHING


def _object(schema: Mapping[str, Any], components: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    fields = {name: _valid(part, components) for name, part in schema.get("properties", {}).items()}
    required = set(schema.get("required", ()))
    wanted = {name: field for name, field in fields.items() if name in required}
    others = {name: field for name, field in fields.items() if name not in required}
    more = st.dictionaries(st.text(max_size=4), ANYTHING, max_size=1 if schema.get("additionalProperties") else 0)
    members = st.fixed_dictionaries(wanted, optional=others)
    return st.tuples(more, members).map(lambda parts: {**parts[0], **parts[1]})
