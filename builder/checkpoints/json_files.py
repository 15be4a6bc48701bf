"""Read the JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from builder.common.errors import CheckpointError
from builder.runtime.fields import JSON_TYPES


def read_json(path: Path, default: Any = None, kind: type = dict) -> Any:
    """Return the JSON value of type `kind` in a file, or `default` if there is no file.

    Raises CheckpointError.
    """
    if default is not None and not path.is_file():
        return default
    try:
        value = json.loads(path.read_text("utf-8"))
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, kind):
        raise CheckpointError(f"{path} has the JSON type {JSON_TYPES[type(value)]}; expected {JSON_TYPES[kind]}")
    return value


def mapping_in(document: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    """Return the value of `name` in `document`, empty if there is none.

    Raises CheckpointError, which names the checkpoint `source`, unless it is a mapping.
    """
    value = document.get(name) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: its setting {name} is {str(value)[:100]!r}; expected a mapping")
    return value
