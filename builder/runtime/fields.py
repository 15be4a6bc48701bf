"""Describe a task's tensors, and read those of one request.

Knows numpy arrays and names; knows nothing about Triton or tokenisers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .contract import RequestLimits

MAX_MESSAGE_LENGTH = 1000  # characters
CANCEL = "cancel"  # a parameter: the id of a request to cancel; a request with it cannot ask for anything else
CANCEL_COMPANION = "stream"  # the one input allowed with it: a model with a batch dimension needs an input


def readable(error: BaseException) -> str:
    """Return the message of `error` for a client, cut to `MAX_MESSAGE_LENGTH` characters and valid UTF-8.

    (Triton's TritonError does not accept half of a surrogate pair, which JSON can spell.)
    """
    text = str(error).encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= MAX_MESSAGE_LENGTH else f"{text[:MAX_MESSAGE_LENGTH]} ..."


class InputError(ValueError):
    """The request is invalid; the message is sent to its client alone."""


@dataclass(frozen=True)
class Field:
    """One tensor of the front model. `dims` excludes the batch dimension; -1 is any size."""

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)
    optional: bool = False


Tensors = Mapping[str, np.ndarray]
JSON_TYPES: "dict[type, str]" = {  # by the types that json.loads returns
    dict: "object", list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null",
}  # fmt: skip


def id_to_cancel(parameters: Mapping[str, Any], inputs: Collection[str]) -> str:
    """Return the id of the request to cancel, from the parameter `cancel`.

    Raises InputError if the parameter has no id (many requests have none), or if the request contains anything else.
    """
    name = parameters[CANCEL]
    if not isinstance(name, str) or not name:
        raise InputError(f"{CANCEL} is {name!r}; expected the id of the request to end, which is a text and not empty")
    others = sorted({*parameters, *inputs} - {CANCEL, CANCEL_COMPANION})
    if others:
        raise InputError(f"{CANCEL} ends another request and does nothing else; leave out {', '.join(others)}")
    return name


def read_parameters(parameters: str) -> dict[str, Any]:
    """Return a request's parameters: Triton's /generate turns every field that is not an input into one.

    `parameters`: a JSON object, as Triton passes it; the ones that Triton adds, and a request's id, are left out.
    """
    given: dict[str, Any] = json.loads(parameters or "{}")
    return {name: value for name, value in given.items() if name != "id" and not name.startswith("triton_")}


def refuse_parameters(parameters: str, inputs: Collection[str]) -> None:
    """Raise InputError for any parameter of a request: a model with one answer does not read them."""
    for name in read_parameters(parameters):
        raise InputError(f"{name!r} is not an input of this model; it has {', '.join(inputs)}")


def refuse_large(tensors: Tensors, limits: RequestLimits, parameters: Mapping[str, Any] | None = None) -> None:
    """Raise InputError for more text, or a longer list, than one request may send. Reads sizes alone."""
    size = sum(len(value) for array in tensors.values() if array.dtype == np.object_ for value in array.ravel())
    size += sum(len(value) for value in (parameters or {}).values() if isinstance(value, str))
    if size > limits.request_bytes:
        raise InputError(
            f"the request has {size} bytes of text; this model takes at most {limits.request_bytes} "
            "(serving.limits.request_bytes of its build)"
        )
    for name, array in tensors.items():
        refuse_long(name, array.shape[-1] if array.ndim else 1, limits)


def refuse_long(name: str, length: int, limits: RequestLimits) -> None:
    """Raise InputError for a list of too many values."""
    if length > limits.list_values:
        raise InputError(
            f"{name} has {length} values; this model takes at most {limits.list_values} "
            "(serving.limits.list_values of its build)"
        )


def strings(tensors: Tensors, name: str) -> list[list[str]]:
    """Decode the BYTES tensor `name`, shape (rows, n), into one list of str a row.

    Raises InputError for bytes that are not UTF-8 and for values without text.
    """
    array = tensors[name]
    if array.ndim != 2 or array.shape[0] == 0 or array.shape[1] == 0:
        raise InputError(f"{name} has shape {list(array.shape)}; expected [rows, values], at least one of each")
    return [[_decode(value, name, row) for value in values] for row, values in enumerate(array)]


def _decode(value: Any, name: str, row: int, may_be_empty: bool = False) -> str:
    try:
        text = value if isinstance(value, str) else bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}, row {row}: byte {error.start} is not UTF-8 ({error.reason}); encode the text as UTF-8"
        ) from error
    if not (text.strip() or may_be_empty):
        raise InputError(f"{name}, row {row}, is empty; send at least one character that is not a space")
    return text


def one_each(tensors: Tensors, name: str) -> list[str]:
    """Decode `name` as one str a row, shape (rows, 1). Raises InputError for any other shape."""
    rows = strings(tensors, name)
    if any(len(row) != 1 for row in rows):
        raise InputError(f"{name} has shape {list(tensors[name].shape)}; expected one text a row: [rows, 1]")
    return [row[0] for row in rows]


def option(tensors: Tensors, name: str, default: Any) -> Any:
    """Read the option `name`, one value for the whole request, as int, float, bool or str.

    Raises InputError if the rows of one request disagree: their answers would have no common shape.
    """
    array = tensors.get(name)
    if array is None:
        return default
    return _common(name, [_decode(v, name, 0) if isinstance(v, (bytes, str)) else v.item() for v in array.ravel()])


def any_text(tensors: Tensors, name: str) -> str | None:
    """Read the option `name`, a text that may be empty; None without it. Raises InputError if the rows disagree."""
    array = tensors.get(name)
    return None if array is None else str(_common(name, [_decode(v, name, 0, True) for v in array.ravel()]))


def _common(name: str, values: list[Any]) -> Any:
    """Return the value that all rows share. Raises InputError."""
    if not values:
        raise InputError(f"{name} is an empty tensor; leave the option out or send one value")
    if any(value != values[0] for value in values):
        raise InputError(f"{name} differs between the rows of one request; send one request for each value")
    return values[0]


def count(tensors: Tensors, name: str, default: int, minimum: int = 1, maximum: float = math.inf) -> int:
    """Read an integer option that must be at least `minimum` and at most `maximum`."""
    value = int(option(tensors, name, default))
    if value < minimum:
        raise InputError(f"{name} is {value}; expected at least {minimum}")
    if value > maximum:
        raise InputError(f"{name} is {value}; expected at most {maximum}")
    return value


def choice(tensors: Tensors, name: str, default: str, choices: tuple[str, ...]) -> str:
    """Read a str option that must be one of `choices`."""
    value = str(option(tensors, name, default)).lower()
    if value not in choices:
        raise InputError(f"{name} is {value!r}; expected one of {', '.join(choices)}")
    return value


def as_bytes(rows: list[list[str]]) -> np.ndarray:
    """Encode rows of str, all of one length, as a BYTES tensor (numpy object array of UTF-8 bytes)."""
    return np.array([[text.encode("utf-8") for text in row] for row in rows], dtype=np.object_)
