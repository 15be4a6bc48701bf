"""Tool calls in chats: required by a request, or chosen by the model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from builder.serving.gateway.http_responses import dumps
from tests.serving.gateway.fake_triton import FakeTriton
from tests.serving.gateway.requests import CHAT, fetch, gateway

CITY = {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "$defs": {"City": {"type": "string"}}}


TOOLS = [
    {"type": "function", "function": {"name": "look_up", "description": "...", "parameters": CITY}},
    {"type": "function", "function": {"name": "stop"}},
]


CALLS: dict[str, Any] = {
    **CHAT,
    "model": "guided",
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "look_up"}},
}


def test_required_tool_call_is_guided_and_parsed() -> None:
    triton = FakeTriton()
    (choice,) = fetch("/v1/chat/completions", CALLS, gateway(triton)).json["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "look_up", "arguments": '{"city":"Oslo"}'}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    (inputs,) = triton.requests
    assert inputs["tools"][0] == dumps(TOOLS), "in the order of the request, which templates write out"
    schema = json.loads(inputs["guide"][0])["json_schema"]
    assert schema["properties"]["name"] == {"const": "look_up"}
    assert schema["properties"]["arguments"]["$defs"] == CITY["$defs"]
    assert schema["properties"]["arguments"]["additionalProperties"] is False, "it has the arguments that it names"
    first, *chunks, done = fetch("/v1/chat/completions", {**CALLS, "stream": True}).events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    (delta,) = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [(c["index"], c["function"]) for c in delta["tool_calls"]] == [(0, call["function"])]
    assert done == "[DONE]"


def test_tool_choice_required_accepts_any_tool_and_cut_calls() -> None:
    triton = FakeTriton()
    body = {**CALLS, "tool_choice": "required", "max_tokens": 1}
    (choice,) = fetch("/v1/chat/completions", body, gateway(triton)).json["choices"]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    _look_up, stop = json.loads(triton.requests[0]["guide"][0])["json_schema"]["anyOf"]
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert stop["properties"]["arguments"] == nothing, "what has no parameters takes none"


def test_tool_schema_references_stay_within_the_tool() -> None:
    name = {"type": "string", "default": {"$ref": "#"}}
    either = {"anyOf": [{"$ref": "#/definitions/a"}, {"$ref": "#/$defs/b"}, {"$ref": "https://a/b"}]}
    parameters = {
        "properties": {"default": name, "title": {"$ref": "#/properties/default"}, "$ref": either},
        "definitions": {"a": name},
        "$defs": {"b": {"items": {"$ref": "#"}}},
    }
    triton = FakeTriton()
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": parameters}}]
    assert fetch("/v1/chat/completions", {**CALLS, "tools": tools}, gateway(triton)).status == 200
    schema = json.loads(triton.requests[0]["guide"][0])["json_schema"]
    here = "#/properties/arguments"
    arguments = schema["properties"]["arguments"]
    assert arguments["$defs"] == {"b": {"items": {"$ref": here}}}
    assert arguments["definitions"] == {"a": name}
    assert arguments["properties"] == {
        "default": name,
        "title": {"$ref": f"{here}/properties/default"},
        "$ref": {"anyOf": [{"$ref": f"{here}/definitions/a"}, {"$ref": f"{here}/$defs/b"}, either["anyOf"][2]]},
    }


def test_tools_may_define_the_same_schema_name_differently() -> None:
    """Equal definitions too: "#" is another function's parameters in each."""
    triton = FakeTriton()
    definitions = ({"b": {"items": {"$ref": "#"}}}, {"b": {"items": {"$ref": "#"}}}, {"b": {"type": "string"}})
    functions = [
        {"name": name, "parameters": {"properties": {"x": {"$ref": "#/$defs/b"}}, "$defs": own}}
        for name, own in zip("abc", definitions, strict=True)
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    body = {**CALLS, "tools": tools, "tool_choice": "required"}
    assert fetch("/v1/chat/completions", body, gateway(triton)).status == 200
    calls = json.loads(triton.requests[0]["guide"][0])["json_schema"]["anyOf"]
    for number, call in enumerate(calls):
        here, arguments = f"#/anyOf/{number}/properties/arguments", call["properties"]["arguments"]
        assert arguments["properties"] == {"x": {"$ref": f"{here}/$defs/b"}}
        wanted = {"type": "string"} if number == 2 else {"items": {"$ref": here}}
        assert arguments["$defs"] == {"b": wanted}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "auto", "model": "writes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "some"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"model": "writes"}, "tools"),
    ],
)
def test_invalid_tool_choices_are_refused(more: dict[str, Any], param: str) -> None:
    refused = fetch("/v1/chat/completions", {**CALLS, **more})
    assert (refused.status, refused.error["param"]) == (400, param), refused.error
    assert fetch("/v1/chat/completions", {**CALLS, "tool_choice": "none"}).json["choices"][0]["message"]["content"]


AUTO = {**CALLS, "tool_choice": "auto", "max_tokens": 64}


LOOK_UP = {"name": "look_up", "arguments": '{"city": "Oslo"}'}


def test_automatic_tool_calls_whole_and_streamed() -> None:
    triton = FakeTriton()
    app = gateway(triton)
    (choice,) = fetch("/v1/chat/completions", AUTO, app).json["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("I look. ", "tool_calls")
    assert [call["function"] for call in message["tool_calls"]] == [LOOK_UP, LOOK_UP]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    (inputs,) = triton.requests
    assert "guide" not in inputs
    assert inputs["skip_special_tokens"] == [False], "the marks of a call may be special tokens"
    usage = {"stream_options": {"include_usage": True}, "logprobs": True}
    *chunks, last, used, _ = fetch("/v1/chat/completions", {**AUTO, **usage, "stream": True}, app).events
    choices = [chunk["choices"][0] for chunk in (*chunks, last)]
    assert choices[0]["delta"]["role"] == "assistant"
    assert "".join(c["delta"].get("content", "") for c in choices) == "I look. "
    streamed = [call for c in choices for call in c["delta"].get("tool_calls", [])]
    assert [(call["index"], call["function"]) for call in streamed] == [(0, LOOK_UP), (1, LOOK_UP)]
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * len(choices[:-1])
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"]) == 64, "none is lost with held text"
    assert used["usage"]["completion_tokens"] == 64


def test_parallel_tool_calls_false_and_cut_calls() -> None:
    (one,) = fetch("/v1/chat/completions", {**AUTO, "parallel_tool_calls": False}).json["choices"]
    assert len(one["message"]["tool_calls"]) == 1
    (cut,) = fetch("/v1/chat/completions", {**AUTO, "max_tokens": 7}).json["choices"]
    assert cut["message"]["content"].startswith("I look. <tool_call>"), "what is not a call is text"
    assert (cut["finish_reason"], "tool_calls" in cut["message"]) == ("length", False)
    (second,) = fetch("/v1/chat/completions", {**AUTO, "max_tokens": 16}).json["choices"]
    assert (second["finish_reason"], len(second["message"]["tool_calls"])) == ("length", 1)


def test_tool_choice_auto_needs_a_tool_parser() -> None:
    refused = fetch("/v1/chat/completions", {**AUTO, "model": "writes"}).error
    assert "it names no tool_parser" in refused["message"]


def test_earlier_tool_calls_reach_the_template_as_objects() -> None:
    triton = FakeTriton()
    call = {"id": "abc", "type": "function", "function": LOOK_UP}
    answered = {"role": "tool", "tool_call_id": "abc", "content": "rain"}
    messages = [*CALLS["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}, answered]
    assert fetch("/v1/chat/completions", {**CHAT, "messages": messages}, gateway(triton)).status == 200
    sent = json.loads(triton.requests[0]["messages"][0])
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert sent[2] == answered


@pytest.mark.parametrize(
    "call",
    [{}, {"function": {"arguments": "x"}}, {"function": {"arguments": "[]"}}, {"function": {"arguments": "[NaN]"}}],
)
def test_earlier_tool_calls_without_arguments_are_refused(call: dict[str, Any]) -> None:
    messages = [*CALLS["messages"], {"role": "assistant", "tool_calls": [call]}]
    refused = fetch("/v1/chat/completions", {**CHAT, "messages": messages})
    assert (refused.status, refused.error["param"]) == (400, "messages")
