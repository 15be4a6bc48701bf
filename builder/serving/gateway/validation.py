"""Validate request bodies, and format pydantic's errors as one sentence with the invalid field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from builder.runtime.fields import JSON_TYPES
from builder.serving.gateway.errors import ApiError, bad_field

PREFIX = "Input should be "
Body = TypeVar("Body", bound=BaseModel)


class StrictBody(BaseModel):
    """JSON object that refuses unknown fields and converts no values."""

    model_config = ConfigDict(extra="forbid", strict=True)

    def one_of(self, *names: str) -> Any:
        """Return the value of the only field of `names` that the request has. Raises ApiError for several."""
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise bad_field(given[1], f"{given[0]} and {given[1]} are two names of one option; send one of them")
        return getattr(self, given[0]) if given else None


class ExtensibleBody(BaseModel):
    """JSON object that keeps unknown fields and converts no values."""

    model_config = ConfigDict(extra="allow", strict=True)


def validate_body(schema: type[Body], value: Any) -> Body:
    """Return `value`, of JSON, as an instance of `schema`. Raises ApiError with the invalid field."""
    if not isinstance(value, dict):
        raise ApiError(400, f"the body has the JSON type {JSON_TYPES[type(value)]}; expected object")
    try:
        return schema.model_validate(value)
    except ValidationError as error:
        raise bad_field(*_first_fault(error, value)) from error


def _first_fault(error: ValidationError, body: dict[str, Any]) -> tuple[str, str]:
    """Return the invalid field of `body`, and a message with the place of the error.

    For a field with several types pydantic reports an error for each. The one that got furthest into the value counts;
    if no type fits, the message names all of them.
    """
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    field = errors[0]["loc"][:1]
    faults = [(_place(e["loc"], body, e["type"] == "missing"), e) for e in errors if e["loc"][:1] == field]
    deepest = max(len(place) for place, _ in faults)
    faults = [(place, e) for place, e in faults if len(place) == deepest]
    faults = [fault for fault in faults if not fault[1]["type"].endswith("_type")][:1] or faults
    place, first = faults[0]
    types = [e["msg"].removeprefix(PREFIX) for other, e in faults[1:] if other == place]
    message = " or ".join(dict.fromkeys([first["msg"], *types]))
    return str(field[0]) if field else "body", f"{'.'.join(map(str, place)) or 'body'}: {message}"


def _place(location: Sequence[int | str], value: Any, missing: bool) -> list[int | str]:
    """Return `location` without the type names that pydantic inserts between keys and indices of `value`."""
    place: list[int | str] = []
    for part in location:
        inside: Any = value
        if isinstance(inside, list) if isinstance(part, int) else isinstance(inside, dict) and part in inside:
            value = inside[part]
        elif not (missing and part == location[-1]):
            continue
        place.append(part)
    return place
