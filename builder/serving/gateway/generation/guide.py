"""Convert the fields that constrain an answer (response_format, guided_*, tools) to one input of the model.

A model with the input `guide` gets it as JSON; one without it can only answer free text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field

from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.generation.tool_calling import Tool, call_schema, close_schema, tool_call_parser
from builder.serving.gateway.http_responses import dumps, loads
from builder.serving.gateway.served_model import ServedModel

GUIDE = "guide"
SKIP_SPECIAL_TOKENS = "skip_special_tokens"  # false: keep the marks of a call, which may be special tokens, in the text
GUIDED = {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "grammar", "guided_choice": "choice"}
TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
STRUCTURED = "structured_outputs"  # vLLM's newer name for guided_*
GUIDE_FIELDS = frozenset({"response_format", STRUCTURED, *GUIDED, *TOOL_FIELDS})


class ToolFields(BaseModel):
    """Fields of a chat about tools."""

    tools: list[Tool] | None = Field(None, max_length=128)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


def guide_inputs(model: ServedModel, body: BaseModel) -> dict[str, Any]:
    """Return the inputs that constrain an answer's form. Raises ApiError for a form that the model does not support."""
    forms = {name: value for name, value in body if name in GUIDE_FIELDS and _constrains(name, value)}
    if isinstance(body, ToolFields) and body.tools:
        forms = {name: value for name, value in forms.items() if name not in TOOL_FIELDS}
    if isinstance(body, ToolFields) and body.tools and body.tool_choice != "none":
        return _call_inputs(model, body.tools, body.tool_choice, min(forms, default=None))
    for name in forms:
        if name in TOOL_FIELDS:
            raise bad_field(name, f"{name} is not a field of this route; tools are called in chats")
        if GUIDE not in model.inputs:
            raise bad_field(name, f"{model.name} was built without guided decoding, which {name} needs")
    if len(forms) > 1:
        raise bad_field(max(forms), f"{' and '.join(sorted(forms))} each constrain the answer; send one of them")
    return {GUIDE: dumps(_guide(*forms.popitem()))} if forms else {}


def _call_inputs(model: ServedModel, tools: Sequence[Tool], choice: Any, other: str | None) -> dict[str, Any]:
    """Return the inputs that describe the tools, and require a call unless `choice` is auto."""
    if other is not None:
        raise bad_field(other, f"{other} and tools each constrain the answer; send one of them")
    is_required = choice not in (None, "auto")
    if "tools" not in model.inputs or (is_required and GUIDE not in model.inputs):
        raise bad_field("tools", f"{model.name} was built without guided decoding, which tools needs")
    inputs: dict[str, Any] = {"tools": dumps([tool.as_sent for tool in tools])}
    if is_required:
        return {**inputs, GUIDE: dumps({"json_schema": call_schema(tools, choice)})}
    tool_call_parser(model, choice)
    return {**inputs, SKIP_SPECIAL_TOKENS: False} if SKIP_SPECIAL_TOKENS in model.inputs else inputs


def _guide(name: str, value: Any, field: str = "") -> dict[str, Any]:
    """Return one entry: the kind of guide and the guide. `field`: the request's name for it."""
    field = field or name
    if name == "response_format":
        return _response_format(value)
    if name == STRUCTURED:
        return _structured(value)
    if name == "guided_json":
        return {"json_schema": _schema(field, value)}
    expected, description = (list, "a list of texts") if name == "guided_choice" else (str, "text")
    if not isinstance(value, expected):
        raise bad_field(field, f"{field} is not {description}")
    return {GUIDED[name]: value}


def _structured(value: Any) -> dict[str, Any]:
    kinds = [name.removeprefix("guided_") for name in GUIDED]
    if not isinstance(value, dict):
        raise bad_field(STRUCTURED, f"structured_outputs is not an object with one of {', '.join(kinds)}, json_object")
    forms = {name: form for name, form in value.items() if form not in (None, False)}
    unknown = [name for name in forms if name not in (*kinds, "json_object")]
    if unknown or len(forms) != 1:
        found = f"has {unknown[0]!r}" if unknown else f"names {len(forms)} forms of an answer"
        raise bad_field(STRUCTURED, f"structured_outputs {found}; expected one of {', '.join(kinds)}, json_object")
    ((kind, form),) = forms.items()
    return {"json_object": True} if kind == "json_object" else _guide(f"guided_{kind}", form, f"{STRUCTURED}.{kind}")


def _response_format(value: Any) -> dict[str, Any]:
    kind = value.get("type") if isinstance(value, dict) else None
    kinds: Mapping[str, Callable[[], dict[str, Any]]] = {
        "json_object": lambda: {"json_object": True},
        "json_schema": lambda: {
            "json_schema": close_schema(_schema("response_format", _member(value, "json_schema", "schema")))
        },
    }
    if not isinstance(kind, str) or kind not in kinds:
        raise bad_field("response_format", "the type of response_format is not text, json_object or json_schema")
    return kinds[kind]()


def _member(value: Any, *names: str) -> Any:
    for name in names:
        if not isinstance(value, dict) or name not in value:
            raise bad_field("response_format", f"response_format has no {'.'.join(names)}")
        value = value[name]
    return value


def _schema(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):  # vLLM's clients also send it as text
        try:
            value = loads(value)
        except (ValueError, RecursionError) as error:
            raise bad_field(name, f"{name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise bad_field(name, f"the schema of {name} is not an object")
    return value


def _constrains(name: str, value: Any) -> bool:
    """Return True unless `value` requests free text."""
    if name == "response_format" and isinstance(value, dict):
        return bool(value != {"type": "text"})
    if name == "parallel_tool_calls" or (name == "tool_choice" and value in ("none", "auto")):
        return False
    return value is not None and value != []
