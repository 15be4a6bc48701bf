"""Define the fields that chats and completions share, and convert them to inputs of the model.

INPUT_NAMES maps OpenAI's names to the model's. A field that is an input of the model under its own name is passed on
unchanged, so that top_k, min_p, ignore_eos and others work as they do with vLLM. Every other field is refused by name.
Fields that constrain an answer (response_format, guided_*, tools) become JSON in one input, `guide`; a model without
that input can only answer free text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field

from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.generation.generate import PERF, TokenUsage
from builder.serving.gateway.generation.tool_calling import Tool, call_schema, close_schema, tool_call_parser
from builder.serving.gateway.http_responses import dumps, loads
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.validation import ExtensibleBody, StrictBody

GUIDE = "guide"
SKIP_SPECIAL_TOKENS = "skip_special_tokens"  # false: keep the marks of a call, which may be special tokens, in the text
GUIDED = {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "grammar", "guided_choice": "choice"}
TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
STRUCTURED = "structured_outputs"  # vLLM's newer name for guided_*
GUIDE_FIELDS = frozenset({"response_format", STRUCTURED, *GUIDED, *TOOL_FIELDS})
INPUT_NAMES: Mapping[str, str] = {  # OpenAI's field -> the model's input
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "n": "n",
    "stop": "stop_words",
    "seed": "random_seed",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
}
DOCUMENTS = ("logit_bias", "chat_template_kwargs")  # inputs that take JSON
CLIENT_FIELDS = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
HARMLESS: Mapping[str, Any] = {"best_of": 1, "modalities": ["text"], "suffix": "", "echo": False, "top_logprobs": 0}
ROUTE_FIELDS = {
    "model",
    "messages",
    "prompt",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "echo",
    "add_generation_prompt",
}  # handled by a route
COUNT_INPUTS = ("return_num_input_tokens", "return_num_output_tokens")
RESERVED_INPUTS = {  # inputs that no field sets under its own name
    "text_input",
    "input_ids",
    "sampling_parameters",
    "messages",
    "stream",
    "logprobs",
    "prompt_logprobs",
    "return_logprobs",
    "echo",
    "guide",
    "tools",
    "timeout_ms",
    *COUNT_INPUTS,
    PERF,
}


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
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise bad_field("response_format", "the type of response_format is not text, json_object or json_schema")
    document = value.get("json_schema")
    if not isinstance(document, dict) or "schema" not in document:
        raise bad_field("response_format", "response_format has no json_schema.schema")
    return {"json_schema": close_schema(_schema("response_format", document["schema"]))}


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


class StreamOptions(StrictBody):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's: usage with every chunk


class GenerationRequest(ExtensibleBody):
    """Fields that chats and completions share; `option_inputs` checks the extra ones one by one."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=16)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_continuous_usage(self) -> bool:
        return self.includes_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats


def usage_member(body: GenerationRequest, usage: TokenUsage) -> str:
    """Return the usage of a chunk as JSON that follows its other members."""
    if not body.includes_usage:
        return ""
    return f',"usage":{dumps(usage.body)}' if body.has_continuous_usage else ',"usage":null'


def option_inputs(model: ServedModel, body: GenerationRequest) -> dict[str, Any]:
    """Return the inputs for a request's options. Raises ApiError for a field that the model does not support."""
    inputs: dict[str, Any] = {**guide_inputs(model, body), **_count_inputs(model, body)}
    explicit = {name: value for name, value in body if value is not None and value != []}
    handled = {*CLIENT_FIELDS, *GUIDE_FIELDS, *ROUTE_FIELDS.intersection(type(body).model_fields)}  # elsewhere
    for name, value in explicit.items():
        if name in handled or (name in HARMLESS and value == HARMLESS[name]):
            continue
        target = INPUT_NAMES.get(name, name)
        if target not in model.inputs or target in RESERVED_INPUTS:
            raise bad_field(name, f"{model.name} does not support {name}; leave it out")
        inputs[target] = dumps(value) if name in DOCUMENTS else value
    return inputs


def _count_inputs(model: ServedModel, body: GenerationRequest) -> dict[str, bool]:
    """Return the inputs that make every response count its tokens."""
    if not body.has_continuous_usage:
        return {}
    if not set(COUNT_INPUTS) <= set(model.inputs):
        raise bad_field(
            "stream_options", f"{model.name} counts its tokens at the end only; leave continuous_usage_stats out"
        )
    return dict.fromkeys(COUNT_INPUTS, True)
