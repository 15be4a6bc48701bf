"""What a task says about its tensors, and how one request's tensors are read.

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

LONGEST_MESSAGE = 1000  # characters
CANCEL = "cancel"  # a parameter: the id of a request that is to end; the request that has it asks for nothing else
BESIDE_CANCEL = "stream"  # the one input that may come with it: a model with a batch dimension takes none without any


def readable(error: BaseException) -> str:
    """The message of `error` as a client can be sent it: not longer than somebody reads, and all of it UTF-8.

    (Half a character, which JSON can spell, is nothing that Triton's TritonError takes.)
    """
    text = str(error).encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:LONGEST_MESSAGE]} ..."


class InputError(ValueError):
    """A request that cannot be answered as it stands; the message goes to its sender alone."""


@dataclass(frozen=True)
class Field:
    """One tensor of the front model. `dims` excludes the batch dimension; -1 is any size."""

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)
    optional: bool = False


Tensors = Mapping[str, np.ndarray]
JSON_TYPES: "dict[type, str]" = {  # of what json.loads returns
    dict: "object", list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null",
}  # fmt: skip


def named_to_end(parameters: Mapping[str, Any], inputs: Collection[str]) -> str:
    """The id of the request that a request with the parameter `cancel` ends.

    Raises InputError where it holds none (requests without an id are many people's), or asks for something else too.
    """
    name = parameters[CANCEL]
    if not isinstance(name, str) or not name:
        raise InputError(f"{CANCEL} is {name!r}; expected the id of the request to end, which is a text and not empty")
    others = sorted({*parameters, *inputs} - {CANCEL, BESIDE_CANCEL})
    if others:
        raise InputError(f"{CANCEL} ends another request and does nothing else; leave out {', '.join(others)}")
    return name


def read_parameters(parameters: str) -> dict[str, Any]:
    """What a request says beside its inputs: Triton's /generate makes a parameter of every field that is none.

    `parameters`: a JSON object, as Triton hands it over; what it adds itself, and a request's id, mean nothing here.
    """
    given: dict[str, Any] = json.loads(parameters or "{}")
    return {name: value for name, value in given.items() if name != "id" and not name.startswith("triton_")}


def refuse_parameters(parameters: str, inputs: Collection[str]) -> None:
    """Raise InputError for any of a request's parameters, which a model of one answer does not look at."""
    for name in read_parameters(parameters):
        raise InputError(f"{name!r} is not an input of this model; it has {', '.join(inputs)}")


def refuse_large(tensors: Tensors, limits: RequestLimits, parameters: Mapping[str, Any] | None = None) -> None:
    """Raise InputError for more text, or a longer list, than one request may bring. Looks at sizes alone."""
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
    """Raise InputError for a list of more values than one may have."""
    if length > limits.list_values:
        raise InputError(
            f"{name} has {length} values; this model takes at most {limits.list_values} "
            "(serving.limits.list_values of its build)"
        )


def strings(tensors: Tensors, name: str) -> list[list[str]]:
    """Decode the BYTES tensor `name`, shape (rows, n), into one list of str a row.

    Raises InputError for bytes that are not UTF-8 and for values that hold no text.
    """
    array = tensors[name]
    if array.ndim != 2 or array.shape[0] == 0 or array.shape[1] == 0:
        raise InputError(f"{name} has shape {list(array.shape)}; expected [rows, values], at least one of each")
    return [[_decode(value, name, row) for value in values] for row, values in enumerate(array)]


def _decode(value: Any, name: str, row: int) -> str:
    try:
        text = value if isinstance(value, str) else bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name}, row {row}: byte {error.start} is not UTF-8 ({error.reason}); encode the text as UTF-8"
        ) from error
    if not text.strip():
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

    Raises InputError when the rows of one request disagree: their answers would have no common shape.
    """
    array = tensors.get(name)
    if array is None:
        return default
    values = [_decode(v, name, 0) if isinstance(v, (bytes, str)) else v.item() for v in array.ravel()]
    if not values:
        raise InputError(f"{name} is an empty tensor; leave the option out or send one value")
    if any(value != values[0] for value in values):
        raise InputError(f"{name} differs between the rows of one request; send one request for each value")
    return values[0]


def count(tensors: Tensors, name: str, default: int, least: int = 1, most: float = math.inf) -> int:
    """Read an integer option that must be at least `least` and at most `most`."""
    value = int(option(tensors, name, default))
    if value < least:
        raise InputError(f"{name} is {value}; expected at least {least}")
    if value > most:
        raise InputError(f"{name} is {value}; expected at most {most}")
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
