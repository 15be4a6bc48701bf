"""Constrain and parse tool calls, which a request requires or the model chooses.

`tool_choice: required` requires a call of any of the tools, a named function a call of that one: a guide keeps the
model from writing anything else. With `auto` the model writes freely, and the gateway looks for calls in the model's
own notation (tool_calls/).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pydantic import ModelWrapValidatorHandler, PrivateAttr, model_validator

from builder.checkpoints.tool_calls import PARSERS, Part, ToolCall
from builder.checkpoints.tool_calls.members import member_texts
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.validation import ExtensibleBody

OPEN_KEYWORDS = (
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
)
SCHEMA_MAPS = (
    "properties",
    "patternProperties",
    "dependentSchemas",
    "$defs",
    "definitions",
)  # map any names to schemas
VALUE_KEYWORDS = ("const", "enum", "default", "examples")  # keywords whose values are not schemas
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}  # meaning of absent `parameters`


class Function(ExtensibleBody):
    name: str
    parameters: dict[str, Any] | None = None


class Tool(ExtensibleBody):
    type: str
    function: Function
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, given: Any, read: ModelWrapValidatorHandler[Tool]) -> Tool:
        tool = read(given)
        tool._given = given
        return tool

    @property
    def as_sent(self) -> dict[str, Any]:
        """The tool in the order it was sent, which a template may print; without keys that have no value."""
        return {**_valued(self._given), "function": _valued(self._given["function"])}


def call_schema(tools: Sequence[Tool], choice: Any) -> dict[str, Any]:
    """Return the JSON schema of a call as `choice` requires it. Raises ApiError if `choice` is not one of the tools."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    allowed = [tool for tool in tools if choice == "required" or tool.function.name == name]
    if not allowed:
        known = ", ".join(tool.function.name for tool in tools)
        raise bad_field("tool_choice", f"tool_choice is neither required nor one of the functions: {known}")
    try:
        if len(allowed) == 1:
            return _call(allowed[0].function, "#")
        return {"anyOf": [_call(tool.function, f"#/anyOf/{number}") for number, tool in enumerate(allowed)]}
    except RecursionError as error:
        raise bad_field("tools", "the parameters of a function have too many levels") from error


def close_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Forbid properties that an object schema does not name, unless it has its own rule for additional ones."""
    named = "properties" in schema and not any(word in schema for word in OPEN_KEYWORDS)
    return {**schema, "additionalProperties": False} if named else schema


class ToolCallParser(Protocol):
    """Parser of one answer: separates text from tool calls."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]: ...


class ForcedCallParser:
    """Reader of an answer that a guide forces to be a call; an answer that is cut off is text."""

    def __init__(self) -> None:
        self.text = ""

    def push(self, text: str) -> list[Part]:
        self.text += text
        return []

    def finish(self) -> list[Part]:
        try:
            call = member_texts(self.text)
            return [ToolCall(json.loads(call["name"]), call["arguments"])]
        except (ValueError, KeyError, RecursionError):
            return [self.text] if self.text else []


def tool_call_parser(model: ServedModel, choice: Any) -> Callable[[], ToolCallParser]:
    """Return the reader for `model` and `choice`. Raises ApiError for an unknown notation."""
    if choice not in (None, "auto"):
        return ForcedCallParser
    notation = model.parameters.get("tool_parser")
    if notation is None or notation not in PARSERS:
        reason = "it names no tool_parser" if notation is None else f"its tool_parser is {notation!r}"
        raise bad_field(
            "tool_choice",
            f"{model.name} cannot choose whether to call a tool: {reason}; available parsers: {', '.join(PARSERS)}. "
            "Send tool_choice required, or name a function",
        )
    return PARSERS[notation]


def _valued(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def _call(function: Function, place: str) -> dict[str, Any]:
    """Return the schema of one function's call at the JSON pointer `place`, with the function's own definitions."""
    parameters = _moved(close_schema(dict(function.parameters or NO_ARGUMENTS)), f"{place}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, to: str) -> Any:
    """Return `schema`, or a part of it, with its references to the root moved to the JSON pointer `to`."""
    if isinstance(schema, list):
        return [_moved(part, to) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for name, value in schema.items():
        if name == "$ref" and (value == "#" or str(value).startswith("#/")):
            moved[name] = to + value[1:]
        elif name in SCHEMA_MAPS and isinstance(value, dict):
            moved[name] = {key: _moved(part, to) for key, part in value.items()}
        else:
            moved[name] = value if name in VALUE_KEYWORDS else _moved(value, to)
    return moved
