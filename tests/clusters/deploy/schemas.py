"""Validation of Kubernetes' own objects and of those of its operators.

Kubernetes' schemas come from kubernetes-validate; scripts/cluster_schemas.py took the operators' schemas from their
repositories.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from kubernetes_validate import validate

DEFINITIONS = Path(__file__).parent / "definitions"
CUSTOM = {path.stem: json.loads(path.read_text("utf-8")) for path in DEFINITIONS.glob("*.json")}


def refuse_invalid(document: dict[str, Any], version: str) -> None:
    """Raise an error that names what a cluster of `version` would refuse, or drop as unknown."""
    custom = CUSTOM.get(document["kind"])
    if custom is None:
        validate(document, version, strict=True)
        return
    assert document["apiVersion"] == custom["apiVersion"]
    problems = [problem.message for problem in Draft202012Validator(_strict(custom["schema"])).iter_errors(document)]
    assert not problems, problems
    assert not list(_nulls(document)), "null is no value"


def _strict(schema: Any) -> Any:
    """Allow named fields only: a cluster drops others, unless the schema allows them."""
    if isinstance(schema, list):
        return [_strict(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: _strict(value) for key, value in schema.items()}
    named = isinstance(strict.get("properties"), dict) and strict.get("type") == "object"
    if named and "additionalProperties" not in strict and not strict.get("x-kubernetes-preserve-unknown-fields"):
        strict["additionalProperties"] = False
    return strict


def _nulls(document: Any) -> Iterator[None]:
    for value in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        if value is None:
            yield None
        yield from _nulls(value)
