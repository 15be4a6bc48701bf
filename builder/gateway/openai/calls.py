"""Calls of tools that a request demands: a guide lets the model write nothing but one, which is then read.

`tool_choice: required` is a call of any of the tools, a named function one of it. Whether to call at all is not left to
the model (`auto`): its own notation of a call would have to be told from text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from builder.gateway.errors import bad_field


class Function(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    name: str
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    function: Function


def call_schema(tools: Sequence[Tool], choice: Any) -> dict[str, Any]:
    """The JSON schema of a call as `choice` demands it. Raises ApiError for a choice that is none of the tools."""
    allowed = list(tools) if choice == "required" else [tool for tool in tools if tool.function.name == _named(choice)]
    if not allowed:
        known = ", ".join(tool.function.name for tool in tools)
        raise bad_field("tool_choice", f"tool_choice is neither required nor one of the functions: {known}")
    definitions: dict[str, Any] = {}
    calls = [_call(tool.function, definitions) for tool in allowed]
    schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**schema, "$defs": definitions} if definitions else schema


def read_call(text: str, identity: str) -> dict[str, Any] | None:
    """The call that an answer is, in OpenAI's shape; None where it was cut before its end."""
    try:
        call = json.loads(text)
    except ValueError:
        return None
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return {"id": identity, "type": "function", "function": {"name": call["name"], "arguments": arguments}}


def _named(choice: Any) -> Any:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def _call(function: Function, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one function's call; its definitions go to the root, which references begin at."""
    parameters = dict(function.parameters or {"type": "object"})
    for name, definition in dict(parameters.pop("$defs", {})).items():
        if definitions.setdefault(name, definition) != definition:
            raise bad_field("tools", f"two functions define {name} differently; rename one of them")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
