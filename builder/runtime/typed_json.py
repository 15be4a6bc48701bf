"""Read JSON as the dataclasses that wrote it; report a missing, unknown or mistyped field by its place.

Standard library only, Python 3.10: a copy of it is emitted with every model. Knows types; no field of any document.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal


class ContractError(ValueError):
    """A document does not match the code that reads it."""


def document_of(path: Path, schema: int, remedy: str) -> dict[str, Any]:
    """Return the JSON object in the file `path`, without its `schema`; `remedy`: what to do if the schema differs.

    Raises ContractError if it differs, or the file cannot be read.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ContractError(f"{path} cannot be read: {error}. {remedy}") from error
    written = document.pop("schema", 1) if isinstance(document, dict) else None
    if written != schema:
        raise ContractError(
            f"{path} has schema {written} and the code beside it reads schema {schema}: they come from different "
            f"versions of build-repo. {remedy}"
        )
    return document


def read_as(kind: Any, value: Any, where: str, remedy: str) -> Any:
    """Return `value`, parsed JSON, as `kind`: a dataclass or type annotation; `remedy`: what to do if it does not fit.

    Raises ContractError with the place, from `where` on, of the part that does not fit.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, where, remedy)
    if origin in (types.UnionType, typing.Union):
        return _read_union(arguments, value, where, remedy)
    if origin is Literal and value in arguments:
        return value
    if origin is not None and _is_subclass(origin, Mapping) and isinstance(value, dict):
        return {key: read_as(arguments[1], item, f"{where}.{key}", remedy) for key, item in value.items()}
    if origin is not None and _is_subclass(origin, Sequence) and isinstance(value, list):
        return tuple(read_as(arguments[0], item, f"{where}[{index}]", remedy) for index, item in enumerate(value))
    if isinstance(kind, type) and isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise ContractError(f"{where} is {value!r}; expected {getattr(kind, '__name__', kind)}. {remedy}")


@functools.lru_cache(maxsize=None)
def _hints(kind: Any) -> Mapping[str, Any]:
    """Return the types of a dataclass's fields, cached: evaluating them takes longer than reading an instance."""
    return typing.get_type_hints(kind)


def _read_union(kinds: Sequence[Any], value: Any, where: str, remedy: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    problems = []
    for kind in kinds:
        try:
            return read_as(kind, value, where, remedy)
        except ContractError as error:
            problems.append(error)
    raise problems[0]


def _is_subclass(origin: Any, base: type) -> bool:
    return isinstance(origin, type) and issubclass(origin, base)


def _read_fields(kind: Any, value: Any, where: str, remedy: str) -> Any:
    if not isinstance(value, dict):
        raise ContractError(f"{where} is {value!r}; expected a mapping. {remedy}")
    hints = _hints(kind)
    known = {entry.name for entry in dataclasses.fields(kind)}
    required = {
        entry.name
        for entry in dataclasses.fields(kind)
        if entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
    }
    wrong = sorted(set(value) - known) or sorted(required - set(value))
    if wrong:
        verb = "has an unknown field" if wrong[0] in value else "lacks the field"
        raise ContractError(f"{where} {verb} {wrong[0]!r}. {remedy}")
    return kind(**{name: read_as(hints[name], item, f"{where}.{name}", remedy) for name, item in value.items()})
