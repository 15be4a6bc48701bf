"""The gateway over a stand-in for Triton: every route, every refusal, and clients that disconnect."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder.common.errors import SpecError
from builder.serving.gateway.access import Allowance, read_keys
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.openai.completions import _logprobs as completion_logprobs
from builder.serving.gateway.responses import dumps
from builder.serving.gateway.triton import stream_error
from builder.serving.gateway.usage import cache_usage
from tests.serving.gateway.asgi import Answer, ask
from tests.serving.gateway.asking import asked, gateway
from tests.serving.gateway.fake_triton import FakeTriton

CHAT: dict[str, Any] = {"model": "writes", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


def test_the_process_knows_nothing_of_pytorch() -> None:
    program = "import sys, builder.commands.gateway, builder.serving.gateway.server; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "uvicorn" in loaded
    assert not loaded & {"torch", "transformers", "onnx", "onnxruntime", "openvino", "tokenizers", "optimum"}


def test_models_are_those_that_name_a_task() -> None:
    models = asked("/v1/models").json["data"]
    names = ["embeds", "features", "guided", "ranks", "sparse", "thinks", "topics", "writes"]
    assert [model["id"] for model in models] == names
    shown = asked("/v1/models/writes").json
    assert (shown["task"], shown["max_model_len"], shown["chat"]) == ("text-generation", 64, True)
    assert shown["report"] is None
    assert asked("/v1/models/embeds").json["report"]["speed_up"] == 3.12
    missing = asked("/v1/models/other")
    assert missing.status == 404
    assert "there are: embeds, features, guided, ranks, sparse, thinks, topics, writes" in missing.error["message"]


def test_a_chat_whole_and_in_chunks() -> None:
    whole = asked("/v1/chat/completions", {**CHAT, "n": 2}).json
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["0 1 2 "] * 2
    assert whole["usage"]["completion_tokens"] == 6
    streamed = asked("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = streamed.events
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == {
        **whole["usage"],
        "completion_tokens": 3,
        "total_tokens": usage["usage"]["prompt_tokens"] + 3,
    }
    assert [chunk["choices"][0]["delta"] for chunk in chunks][:2] == [
        {"role": "assistant", "content": "0 "},
        {"content": "1 "},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert len({chunk["id"] for chunk in (*chunks, usage)}) == 1
    assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, "model": "guided"}),
        (
            "/v1/chat/completions",
            {**CHAT, "model": "guided", "tools": [{"type": "function", "function": {"name": "f"}}]},
        ),
        ("/v1/completions", {"model": "guided", "prompt": "a", "max_tokens": 3}),
    ],
)
def test_every_chunk_counts_where_that_is_asked_for(path: str, body: dict[str, Any]) -> None:
    """Serve vLLM's continuous_usage_stats, which guidellm asks for."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, usage, _done = asked(path, body).events
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == usage["usage"]["completion_tokens"] == 3
    assert chunks[0]["usage"]["completion_tokens"] == 1
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {usage["usage"]["prompt_tokens"]} != {0}
    older = {"model": "writes", "prompt": "a", "stream": True, "stream_options": body["stream_options"]}
    assert asked("/v1/completions", older).error["param"] == "stream_options"


def test_options_become_inputs_of_the_model() -> None:
    triton = FakeTriton()
    options = {"seed": 5, "stop": "x", "logit_bias": {"42": -5}, "top_k": 3, "max_completion_tokens": 2, "user": "me"}
    body = {"model": "writes", "messages": CHAT["messages"], **options}
    assert asked("/v1/chat/completions", body, gateway(triton)).status == 200
    (inputs,) = triton.requests
    assert inputs["random_seed"] == [5]
    assert inputs["stop_words"] == ["x"]
    assert json.loads(inputs["logit_bias"][0]) == {"42": -5}
    assert (inputs["top_k"], inputs["max_tokens"]) == ([3], [2])
    assert "user" not in inputs


def test_a_template_is_rendered_as_the_request_says() -> None:
    triton = FakeTriton()
    messages = [*CHAT["messages"], {"role": "assistant", "content": "A"}]
    says = {"chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True}
    for path, more in (("/v1/chat/completions", {"reasoning_effort": "low"}), ("/tokenize", {})):
        body = {"model": "guided", "messages": messages, "add_generation_prompt": False, **says, **more}
        assert asked(path, body, gateway(triton)).status == 200
        sent = triton.requests[-1]
        assert json.loads(sent["chat_template_kwargs"][0]) == {"enable_thinking": False}
        assert sent["continue_final_message"] == [True]
        assert "add_generation_prompt" not in sent
        for wrong in ({"add_generation_prompt": True}, {"continue_final_message": False}):
            assert asked(path, {**body, **wrong}).error["param"] == "add_generation_prompt"
        older = asked("/v1/chat/completions", {**CHAT, **says})
        assert (older.status, older.error["param"]) == (400, "chat_template_kwargs")
    assert triton.requests[0]["reasoning_effort"] == ["low"]


def test_logprobs_have_openais_shape() -> None:
    body = {**CHAT, "max_tokens": 1, "logprobs": True, "top_logprobs": 1}
    (token,) = asked("/v1/chat/completions", body).json["choices"][0]["logprobs"]["content"]
    assert token == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [{"token": "x", "logprob": -9999.0, "bytes": [120]}],
    }
    completion = asked("/v1/completions", {"model": "writes", "prompt": "a", "max_tokens": 1, "logprobs": 1}).json
    assert completion["choices"][0]["logprobs"]["token_logprobs"] == [-0.5]
    assert completion["choices"][0]["logprobs"]["top_logprobs"] == [{"x": -9999.0, "a": -0.5}], "the token's own too"


def test_an_echoed_prompt_has_log_probabilities_too() -> None:
    body = {"prompt": "a", "max_tokens": 1, "logprobs": 1, "echo": True}
    logprobs = asked("/v1/completions", {"model": "guided", **body}).json["choices"][0]["logprobs"]
    assert (logprobs["tokens"], logprobs["token_logprobs"]) == (["p", "a"], [None, -0.5])
    assert logprobs["top_logprobs"][0] is None
    assert asked("/v1/completions", {"model": "writes", **body}).error["param"] == "echo"


def test_several_prompts_are_answered_in_their_order() -> None:
    body = {"model": "writes", "prompt": ["a", "bcd"], "max_tokens": 2, "n": 2}
    whole = asked("/v1/completions", body).json
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert whole["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 8,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    chunks = asked("/v1/completions", {**body, "stream": True}).events[:-1]
    assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1, 2, 3}


def test_prompts_may_be_token_ids_of_the_model() -> None:
    triton = FakeTriton()
    body = {"model": "guided", "max_tokens": 2}
    for prompt, sent in (([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]]), (["a", [5]], [[5]])):
        triton.requests.clear()
        answer = asked("/v1/completions", {**body, "prompt": prompt}, gateway(triton))
        assert len(answer.json["choices"]) == len(triton.requests)
        assert [inputs["input_ids"] for inputs in triton.requests if "input_ids" in inputs] == sent
    prompts: tuple[object, ...] = ([], [[]], [5, "a"], [[5, "a"]], [True], [2**31], [""], 5)
    for wrong in prompts:
        assert asked("/v1/completions", {**body, "prompt": wrong}).error["param"] in ("prompt", "input_ids"), wrong
    older = asked("/v1/completions", {**body, "model": "writes", "prompt": [5]})
    assert "writes takes texts" in older.error["message"]


def test_embeddings_of_many_texts_as_numbers_and_as_base64() -> None:
    texts = ["x" * (1 + i) for i in range(20)]  # three requests of the model, which takes 8 rows
    floats = asked("/v1/embeddings", {"model": "embeds", "input": texts}).json
    assert [entry["embedding"][0] for entry in floats["data"]] == [float(len(text)) for text in texts]
    assert floats["usage"]["prompt_tokens"] == sum(map(len, texts))
    packed = asked("/v1/embeddings", {"model": "embeds", "input": texts, "encoding_format": "base64"}).json
    assert [np.frombuffer(base64.b64decode(e["embedding"]), "<f4").tolist() for e in packed["data"]] == [
        e["embedding"] for e in floats["data"]
    ]
    short = asked("/v1/embeddings", {"model": "embeds", "input": "xxxx", "dimensions": 2}).json
    assert short["data"][0]["embedding"] == pytest.approx([0.8, 0.6])


def test_a_number_that_json_does_not_have_is_an_error_and_not_a_null() -> None:
    refused = asked("/v1/embeddings", {"model": "embeds", "input": ["x", "not finite"]})
    assert refused.status == 500
    assert "embedding with a number that is not finite" in refused.json["error"]["message"]


def test_half_a_character_in_a_request_comes_back_in_its_error() -> None:
    refused = asked("/v1/embeddings", {"model": "\ud800", "input": "x"})
    assert refused.status == 404
    assert "embeds" in refused.json["error"]["message"]


def test_places_of_tokens_are_counted_through_a_stream() -> None:
    """Regression: each chunk began at 0 again."""
    body = {"model": "writes", "prompt": "a", "max_tokens": 3, "n": 2, "logprobs": 0, "stream": True}
    *chunks, done = asked("/v1/completions", body).events
    places = [
        [c["choices"][0]["logprobs"]["text_offset"] for c in chunks if c["choices"][0]["index"] == i] for i in (0, 1)
    ]
    assert places == [[[0], [1], [2]]] * 2
    assert done == "[DONE]"


def test_of_alternatives_spelled_alike_the_likeliest_is_told() -> None:
    """Regression: parts of characters are all spelled U+FFFD, and the reported probability was that of the last."""
    top = [{"token": token, "text": "\ufffd", "logprob": -float(token)} for token in (1, 2)]
    told = completion_logprobs([{"token": 1, "text": "a", "logprob": -1.0, "top": top}])
    assert told["top_logprobs"] == [{"\ufffd": -1.0, "a": -1.0}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [1, 2]}, "input"),
        ({"input": []}, "input"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name"),
        ({"input": "a", "model": "writes"}, "model"),
        ({"input": "a", "other": 1}, "other"),
        ({"input": "\ud800"}, "text_input"),
    ],
)
def test_embeddings_that_are_refused_name_the_field(body: dict[str, Any], param: str) -> None:
    refused = asked("/v1/embeddings", {"model": "embeds", **body})
    assert (refused.status, refused.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"max_tokens": 65}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"temperature": "1"}, "temperature"),
        ({"top_k": 1.5}, "top_k"),
        ({"stop": ["a", 1]}, "stop"),
        ({"top_k": [1, 2]}, "top_k"),
        ({"n": 17}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"echo": True}, "echo"),
        ({"prompt": "x"}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"text_input": "x"}, "text_input"),
        ({"model": "embeds"}, "model"),
    ],
)
def test_a_chat_that_cannot_be_answered_is_refused_by_its_field(more: dict[str, Any], param: str) -> None:
    refused = asked("/v1/chat/completions", {**CHAT, **more})
    assert (refused.status, refused.error["param"]) == (400, param), refused.error
    assert refused.error["type"] == "invalid_request_error"


def test_what_asks_for_nothing_but_text_is_taken() -> None:
    body = {
        **CHAT,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "best_of": 1,
        "echo": False,
        "seed": None,
        "stop": [],
    }
    assert asked("/v1/chat/completions", body).status == 200


def test_a_field_of_another_route_is_not_ignored() -> None:
    completion = {"model": "writes", "prompt": "a"}
    for name, value in (("top_logprobs", 2), ("messages", CHAT["messages"])):
        refused = asked("/v1/completions", {**completion, name: value})
        assert (refused.status, refused.error["param"]) == (400, name)
    assert asked("/v1/completions", {**completion, "top_logprobs": 0}).status == 200


def test_one_answer_where_a_request_does_not_say_how_many() -> None:
    """Regression: with num_return_sequences in the checkpoint, the answers of several prompts ran into one another."""
    app = gateway(FakeTriton(returned=2))
    (choice,) = asked("/v1/chat/completions", CHAT, app).json["choices"]
    assert choice["message"]["content"] == "0 1 2 "
    prompts = {"model": "writes", "prompt": ["a", "b"], "max_tokens": 2}
    assert [choice["text"] for choice in asked("/v1/completions", prompts, app).json["choices"]] == ["0 1 "] * 2
    task = {"model": "writes", "inputs": ["a"], "parameters": {"max_tokens": 2}}
    assert asked("/v1/tasks/text-generation", task, app).json[0]["generated_text"] == "0 1 "


SCHEMA = {"type": "object"}
NAMED = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("asked_for", "guide"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            {"json_schema": SCHEMA},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": NAMED}}},
            {"json_schema": {**NAMED, "additionalProperties": False}},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {**NAMED, "allOf": []}}}},
            {"json_schema": {**NAMED, "allOf": []}},
        ),
        ({"guided_json": NAMED}, {"json_schema": NAMED}),
        ({"guided_json": '{"type": "object"}'}, {"json_schema": SCHEMA}),
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"structured_outputs": {"json": NAMED}}, {"json_schema": NAMED}),
        ({"structured_outputs": {"json": '{"type": "object"}', "regex": None}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"grammar": "start: /a/"}}, {"grammar": "start: /a/"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ],
)
def test_a_model_with_a_guide_gets_it_as_it_takes_it(asked_for: dict[str, Any], guide: dict[str, Any]) -> None:
    triton = FakeTriton()
    assert asked("/v1/completions", {"model": "guided", "prompt": "a", **asked_for}, gateway(triton)).status == 200
    assert json.loads(triton.requests[0]["guide"][0]) == guide


@pytest.mark.parametrize(
    ("asked_for", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": '{"const": NaN}'}, "guided_json"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": "{}"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
        ({"tools": [{"type": "function"}]}, "tools"),
    ],
)
def test_a_guide_that_says_nothing_is_refused(asked_for: dict[str, Any], param: str) -> None:
    refused = asked("/v1/completions", {"model": "guided", "prompt": "a", **asked_for})
    assert (refused.status, refused.error["param"]) == (400, param)


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


def test_a_call_that_is_demanded_is_guided_and_read() -> None:
    triton = FakeTriton()
    (choice,) = asked("/v1/chat/completions", CALLS, gateway(triton)).json["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "look_up", "arguments": '{"city":"Oslo"}'}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    (inputs,) = triton.requests
    assert inputs["tools"][0] == dumps(TOOLS), "in the order of the request, which templates write out"
    schema = json.loads(inputs["guide"][0])["json_schema"]
    assert schema["properties"]["name"] == {"const": "look_up"}
    assert schema["properties"]["arguments"]["$defs"] == CITY["$defs"]
    assert schema["properties"]["arguments"]["additionalProperties"] is False, "it has the arguments that it names"
    first, *chunks, done = asked("/v1/chat/completions", {**CALLS, "stream": True}).events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    (delta,) = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [(c["index"], c["function"]) for c in delta["tool_calls"]] == [(0, call["function"])]
    assert done == "[DONE]"


def test_any_of_the_tools_may_be_demanded_and_a_call_may_be_cut() -> None:
    triton = FakeTriton()
    body = {**CALLS, "tool_choice": "required", "max_tokens": 1}
    (choice,) = asked("/v1/chat/completions", body, gateway(triton)).json["choices"]
    assert choice["finish_reason"] == "length"
    assert "tool_calls" not in choice["message"]
    _look_up, stop = json.loads(triton.requests[0]["guide"][0])["json_schema"]["anyOf"]
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    assert stop["properties"]["arguments"] == nothing, "what has no parameters takes none"


def test_what_arguments_refer_to_is_in_their_own_schema() -> None:
    name = {"type": "string", "default": {"$ref": "#"}}
    either = {"anyOf": [{"$ref": "#/definitions/a"}, {"$ref": "#/$defs/b"}, {"$ref": "https://a/b"}]}
    parameters = {
        "properties": {"default": name, "title": {"$ref": "#/properties/default"}, "$ref": either},
        "definitions": {"a": name},
        "$defs": {"b": {"items": {"$ref": "#"}}},
    }
    triton = FakeTriton()
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": parameters}}]
    assert asked("/v1/chat/completions", {**CALLS, "tools": tools}, gateway(triton)).status == 200
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


def test_functions_may_define_the_same_name_each_in_its_own_way() -> None:
    """Equal definitions too: "#" is another function's parameters in each."""
    triton = FakeTriton()
    definitions = ({"b": {"items": {"$ref": "#"}}}, {"b": {"items": {"$ref": "#"}}}, {"b": {"type": "string"}})
    functions = [
        {"name": name, "parameters": {"properties": {"x": {"$ref": "#/$defs/b"}}, "$defs": own}}
        for name, own in zip("abc", definitions, strict=True)
    ]
    tools = [{"type": "function", "function": function} for function in functions]
    body = {**CALLS, "tools": tools, "tool_choice": "required"}
    assert asked("/v1/chat/completions", body, gateway(triton)).status == 200
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
def test_calls_that_cannot_be_made_are_refused(more: dict[str, Any], param: str) -> None:
    refused = asked("/v1/chat/completions", {**CALLS, **more})
    assert (refused.status, refused.error["param"]) == (400, param), refused.error
    assert asked("/v1/chat/completions", {**CALLS, "tool_choice": "none"}).json["choices"][0]["message"]["content"]


AUTO = {**CALLS, "tool_choice": "auto", "max_tokens": 64}
LOOK_UP = {"name": "look_up", "arguments": '{"city": "Oslo"}'}


def test_calls_of_the_models_own_accord_whole_and_streamed() -> None:
    triton = FakeTriton()
    app = gateway(triton)
    (choice,) = asked("/v1/chat/completions", AUTO, app).json["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("I look. ", "tool_calls")
    assert [call["function"] for call in message["tool_calls"]] == [LOOK_UP, LOOK_UP]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    (inputs,) = triton.requests
    assert "guide" not in inputs
    assert inputs["skip_special_tokens"] == [False], "the marks of a call may be special tokens"
    usage = {"stream_options": {"include_usage": True}, "logprobs": True}
    *chunks, last, used, _ = asked("/v1/chat/completions", {**AUTO, **usage, "stream": True}, app).events
    choices = [chunk["choices"][0] for chunk in (*chunks, last)]
    assert choices[0]["delta"]["role"] == "assistant"
    assert "".join(c["delta"].get("content", "") for c in choices) == "I look. "
    streamed = [call for c in choices for call in c["delta"].get("tool_calls", [])]
    assert [(call["index"], call["function"]) for call in streamed] == [(0, LOOK_UP), (1, LOOK_UP)]
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * len(choices[:-1])
    assert choices[-1]["finish_reason"] == "tool_calls"
    assert sum(len(c["logprobs"]["content"]) for c in choices if c["logprobs"]) == 64, "none is lost with held text"
    assert used["usage"]["completion_tokens"] == 64


def test_one_call_at_a_time_and_a_call_that_is_cut() -> None:
    (one,) = asked("/v1/chat/completions", {**AUTO, "parallel_tool_calls": False}).json["choices"]
    assert len(one["message"]["tool_calls"]) == 1
    (cut,) = asked("/v1/chat/completions", {**AUTO, "max_tokens": 7}).json["choices"]
    assert cut["message"]["content"].startswith("I look. <tool_call>"), "what is not a call is text"
    assert (cut["finish_reason"], "tool_calls" in cut["message"]) == ("length", False)
    (second,) = asked("/v1/chat/completions", {**AUTO, "max_tokens": 16}).json["choices"]
    assert (second["finish_reason"], len(second["message"]["tool_calls"])) == ("length", 1)


def test_a_notation_that_is_not_known_is_refused_by_name() -> None:
    refused = asked("/v1/chat/completions", {**AUTO, "model": "writes"}).error
    assert "does not say how it writes calls" in refused["message"]


def test_parts_of_a_message_are_joined_where_the_template_does_not_read_them() -> None:
    triton = FakeTriton()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for model, wanted in (("writes", "a\nb"), ("guided", parts)):
        body = {"model": model, "messages": [{"role": "user", "content": parts}]}
        assert asked("/v1/chat/completions", body, gateway(triton)).status == 200
        assert json.loads(triton.requests[-1]["messages"][0])[0]["content"] == wanted
    tokens = asked("/tokenize", {"model": "guided", "messages": body["messages"]}, gateway(triton))
    assert tokens.status == 200
    assert json.loads(triton.requests[-1]["messages"][0])[0]["content"] == parts


def test_parts_of_a_role_that_the_template_does_not_read_in_parts_are_joined() -> None:
    """Regression: templates with parts for a user wrote Python's list for a tool or the system, or one part alone."""
    triton = FakeTriton()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"model": "guided", "messages": [{"role": role, "content": parts} for role in ("developer", "user", "tool")]}
    assert asked("/v1/chat/completions", body, gateway(triton)).status == 200
    sent = json.loads(triton.requests[-1]["messages"][0])
    assert sent == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": parts},
        {"role": "tool", "content": "a\nb"},
    ]


def test_calls_of_earlier_answers_reach_the_template_as_objects() -> None:
    triton = FakeTriton()
    call = {"id": "abc", "type": "function", "function": LOOK_UP}
    answered = {"role": "tool", "tool_call_id": "abc", "content": "rain"}
    messages = [*CALLS["messages"], {"role": "assistant", "content": None, "tool_calls": [call]}, answered]
    assert asked("/v1/chat/completions", {**CHAT, "messages": messages}, gateway(triton)).status == 200
    sent = json.loads(triton.requests[0]["messages"][0])
    assert sent[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert sent[2] == answered


@pytest.mark.parametrize(
    "call",
    [{}, {"function": {"arguments": "x"}}, {"function": {"arguments": "[]"}}, {"function": {"arguments": "[NaN]"}}],
)
def test_earlier_calls_without_arguments_are_refused(call: dict[str, Any]) -> None:
    messages = [*CALLS["messages"], {"role": "assistant", "tool_calls": [call]}]
    refused = asked("/v1/chat/completions", {**CHAT, "messages": messages})
    assert (refused.status, refused.error["param"]) == (400, "messages")


def test_reranking_in_the_shapes_of_cohere_jina_and_tei() -> None:
    body = {"query": "q", "documents": ["ab", "xx", {"text": "xa"}], "top_n": 2, "return_documents": True}
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        answer = asked(path, body).json
        assert [(r["index"], r["relevance_score"]) for r in answer["results"]] == [(1, 1.0), (2, 0.5)]
        assert answer["results"][0]["document"] == {"text": "xx"}
    tei = asked("/rerank", {"query": "q", "texts": ["ab", "xx"], "return_text": True}).json
    assert tei == [{"index": 1, "text": "xx", "score": 1.0}, {"index": 0, "text": "ab", "score": 0.0}]
    many = asked("/v1/rerank", {"query": "q", "documents": ["a"] * 99 + ["x"]}).json["results"]
    assert len(many) == 100
    assert many[0]["index"] == 99


def test_tei() -> None:
    assert asked("/embed", {"inputs": ["xxxx", "x"], "normalize": False}).json[0][:2] == [4.0, 3.0]
    assert np.linalg.norm(asked("/embed", {"inputs": "xxxx"}).json[0]) == pytest.approx(1)
    assert asked("/embed", {"inputs": "xxxx", "normalize": False, "dimensions": 2}).json == [[4.0, 3.0]]
    assert asked("/embed", {"inputs": "xxxx", "dimensions": 2}).json == [pytest.approx([0.8, 0.6])]
    for name, value in {"prompt_name": "query", "dimensions": 2, "normalize": False}.items():
        refused = asked("/embed_all", {"inputs": "x", name: value})
        assert (refused.status, name in refused.json["error"]) == (400, True), "vectors of tokens have none of these"
    unsaid = {"prompt_name": None, "dimensions": None, "normalize": True}
    assert asked("/embed_all", {"inputs": "ab", **unsaid}).json == [[[97, 0, 0, 1], [98, 0, 0, 1]]], "clients send them"
    expected = [{"score": 0.75, "label": "a"}, {"score": 0.25, "label": "b"}]
    assert asked("/predict", {"inputs": "text"}).json == expected
    assert asked("/predict", {"inputs": ["a", "pair"]}).json == expected
    assert asked("/predict", {"inputs": [["one"], ["a", "pair"]]}).json == [expected] * 2
    info = asked("/info").json
    assert (info["model_id"], info["max_input_length"]) == ("embeds", 64)
    refused = asked("/embed", {"inputs": ""})
    assert refused.status == 400
    assert refused.json["error_type"] == "Validation"
    sparse = asked("/embed_sparse", {"inputs": ["ab", "c"]}).json
    assert sparse == [[{"index": 97, "value": 0.5}, {"index": 98, "value": 0.5}], [{"index": 99, "value": 0.5}]]
    assert asked("/embed_sparse", {"inputs": "ab", "model": "embeds"}).status == 400
    assert asked("/embed_sparse", {"inputs": "ab", "prompt_name": "query"}).status == 400
    triton = FakeTriton()
    for truncate in (True, False):
        assert asked("/embed_sparse", {"inputs": "ab", "truncate": truncate}, gateway(triton)).status == 200
        assert triton.requests[-1]["truncate"] == [[truncate]], "a text that must not be cut is not cut"


def test_tokens_as_teis_and_vllms_clients_ask_for_them() -> None:
    begin = {"id": 1, "text": "<s>", "special": True, "start": None, "stop": None}
    letter = {"id": 97, "text": "a", "special": False, "start": 0, "stop": 1}
    assert asked("/tokenize", {"model": "embeds", "inputs": "a"}).json == [[begin, letter]]
    bare = {"model": "guided", "inputs": ["a", "b"], "add_special_tokens": False}
    assert asked("/tokenize", bare).json == [[letter], [{**letter, "id": 98, "text": "b"}]]
    counted = asked("/tokenize", {"model": "embeds", "prompt": "a", "return_token_strs": True}).json
    assert counted == {"count": 2, "max_model_len": 64, "tokens": [1, 97], "token_strs": ["<s>", "a"]}
    chat = asked("/tokenize", {"model": "guided", "messages": CHAT["messages"]}).json
    assert chat["count"] == len(chat["tokens"]) > 2
    assert asked("/detokenize", {"model": "guided", "tokens": [1, 97]}).json == {"prompt": "<s>a"}
    assert asked("/decode", {"model": "guided", "ids": [[1, 97], [98]]}).json == ["a", "b"]
    assert asked("/decode", {"ids": [97]}).json == ["a"], "the only model that can"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"model": "writes", "prompt": "a"}, "model"),
        ("/tokenize", {"model": "ranks", "prompt": "a"}, "model"),
        ("/tokenize", {"model": "embeds", "messages": [{"role": "user", "content": "a"}]}, "messages"),
        ("/tokenize", {"model": "guided"}, "prompt"),
        ("/tokenize", {"model": "guided", "prompt": "a", "messages": []}, "messages"),
        ("/tokenize", {"prompt": "a"}, "model"),
        ("/detokenize", {"model": "embeds", "tokens": [1]}, "model"),
        ("/detokenize", {"model": "guided", "tokens": ["a"]}, "tokens"),
    ],
)
def test_tokens_that_no_model_tells_are_refused_by_the_field(path: str, body: dict[str, Any], param: str) -> None:
    refused = asked(path, body)
    assert (refused.status, refused.error["param"]) == (400, param), refused.error


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[1]", 400),
        (b'{"model": NaN}', 400),
        (b'{"model": 1e999}', 400),
        (b"\xff\xfe\xfd", 400),
        (b"[" * 100_000, 400),
        (b'{"input": ' + b"9" * 5000 + b"}", 400),
        (b" " * 2000, 413),
    ],
)
def test_a_body_that_is_not_a_request(body: bytes, status: int) -> None:
    limit = 1000 if status == 413 else 1 << 20
    assert asked("/v1/embeddings", body, gateway(max_body=limit)).status == status


def test_other_paths_methods_and_media_types() -> None:
    assert asked("/v1/other").status == 404
    assert asked("/v1/embeddings").status == 405
    assert asked("/v1/embeddings", {}, headers={"content-type": "text/plain"}).status == 415


def test_the_document_describes_the_routes_that_exist() -> None:
    document = asked("/openapi.json").json
    paths = document["paths"]
    assert {"/v1/chat/completions", "/v1/tasks/{task}", "/rerank", "/openapi.json"} <= set(paths)
    assert "/embed_sparse" in paths
    chat = paths["/v1/chat/completions"]["post"]
    assert chat["summary"] == "Answer a chat with a completion, or a stream of its chunks."
    schema = chat["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["model", "messages"]
    assert schema["properties"]["messages"]["items"] == {"$ref": "#/components/schemas/Message"}
    assert "text/event-stream" in chat["responses"]["200"]["content"]
    (parameter,) = paths["/v1/tasks/{task}"]["post"]["parameters"]
    assert (parameter["name"], parameter["in"]) == ("task", "path")
    references = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert references == set(document["components"]["schemas"])


def test_no_more_wait_for_an_encoder_than_may() -> None:
    triton, body = FakeTriton(), {"model": "embeds", "input": "a"}
    triton.may_answer = may_answer = asyncio.Event()
    app = gateway(triton, max_waiting=2)

    async def several() -> list[Answer]:
        embeds = [asyncio.ensure_future(ask(app, "/v1/embeddings", body)) for _ in range(3)]
        others = [ask(app, "/v1/chat/completions", CHAT), ask(app, "/predict", {"inputs": "a"})]
        left = ask(app, "/v1/embeddings", body, leave_after=0)
        rest = asyncio.gather(*embeds[:2], *others, left)
        refused = await embeds[2]
        may_answer.set()
        return [refused, *await rest]

    refused, first, second, chat, other, _ = asyncio.run(several())
    assert [first.status, second.status, chat.status, other.status] == [200] * 4
    assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (429, "queue_full", "1")
    assert asked("/v1/embeddings", body, app).status == 200, "those that are over count no more"


def test_a_full_queue_says_when_to_come_back() -> None:
    refused = asked("/v1/chat/completions", {**CHAT, "stream": True}, gateway(FakeTriton(slots=0)))
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert refused.error["code"] == "queue_full"


def test_keys_and_what_they_may_use() -> None:
    keys = (("ann", "sk-1"), ("bob", "sk-2"))
    app = gateway(keys=keys, requests_per_minute=2)
    assert asked("/v1/models", app=app).status == 401
    assert asked("/v1/models", app=app, headers={"authorization": "Basic sk-1"}).status == 401
    assert asked("/health", app=app).status == 200
    ann, bob = ({"authorization": f"Bearer {secret}"} for _, secret in keys)
    assert [asked("/v1/models", app=app, headers=ann).status for _ in range(3)] == [200, 200, 429]
    assert asked("/v1/models", app=app, headers=bob).status == 200


def test_tokens_are_counted_after_the_answer() -> None:
    app = gateway(tokens_per_minute=5)
    body = {"model": "embeds", "input": "x" * 20}
    assert asked("/v1/embeddings", body, app).status == 200
    refused = asked("/v1/embeddings", body, app)
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) > 60


def test_an_allowance_fills_evenly() -> None:
    now = 0.0
    allowance = Allowance(60, "requests", lambda: now)
    allowance.spend("a", 60)
    with pytest.raises(ApiError):
        allowance.refuse("a")
    now = 1.5
    allowance.refuse("a")


def test_keys_are_read_from_a_file_and_the_environment(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# people\nann:sk-1\n\n")
    assert read_keys(tmp_path / "keys", "bob:a:b") == (("ann", "sk-1"), ("bob", "a:b"))
    for text in ("sk-1", "ann:", "ann:x\nann:y", ""):
        (tmp_path / "keys").write_text(text)
        with pytest.raises(SpecError):
            read_keys(tmp_path / "keys", "")


@pytest.mark.parametrize(("stream", "leave_after"), [(True, 1), (True, 0), (False, 0)])
def test_a_client_that_leaves_frees_its_slot(stream: bool, leave_after: int) -> None:
    triton = FakeTriton(step_s=0.001)
    log = io.StringIO()
    body = {**CHAT, "max_tokens": 64, "stream": stream}
    asked("/v1/chat/completions", body, gateway(triton, log), leave_after=leave_after)
    assert triton.running == 0
    assert json.loads(log.getvalue())["status"] == 499


def test_one_that_leaves_while_models_are_looked_up_does_not_take_the_others_along() -> None:
    triton = FakeTriton()
    triton.index_s = 0.05
    app = gateway(triton)

    async def both() -> tuple[Answer, Answer]:
        first = asyncio.ensure_future(ask(app, "/v1/chat/completions", CHAT, leave_after=0))
        second = asyncio.ensure_future(ask(app, "/v1/chat/completions", CHAT))
        return await asyncio.gather(first, second)

    assert asyncio.run(both())[1].status == 200


def test_an_answer_that_takes_too_long_is_broken_off() -> None:
    triton, body = FakeTriton(), {**CHAT, "max_tokens": 64}
    triton.may_answer = asyncio.Event()  # but for the first token
    whole = asked("/v1/chat/completions", body, gateway(triton, timeout_s=0.1))
    assert (whole.status, whole.error["code"]) == (504, "timeout")
    assert triton.running == 0
    triton.may_answer = asyncio.Event()
    streamed = asked("/v1/chat/completions", {**body, "stream": True}, gateway(triton, timeout_s=2))
    assert streamed.status == 200, "its first token came before"
    assert streamed.events[-1]["error"]["code"] == "timeout"
    assert triton.running == 0


def test_one_that_stops_takes_nothing_new_and_finishes_what_runs() -> None:
    triton = FakeTriton()
    triton.may_answer = may_answer = asyncio.Event()
    app = gateway(triton)

    async def run() -> tuple[Answer, Answer, Answer]:
        running = asyncio.ensure_future(ask(app, "/v1/chat/completions", CHAT))
        while not app.active:
            await asyncio.sleep(0.001)
        app.draining = True
        refused, alive = await ask(app, "/v1/models"), await ask(app, "/health")
        assert app.active == 1
        may_answer.set()
        return await running, refused, alive

    answered, refused, alive = asyncio.run(run())
    assert (answered.status, refused.status, alive.status) == (200, 503, 200)
    assert refused.headers["retry-after"] == "5"
    assert app.active == 0


def test_ready_is_what_triton_is() -> None:
    triton = FakeTriton()
    assert asked("/health/ready", app=gateway(triton)).status == 200
    triton.up = False
    assert asked("/health/ready", app=gateway(triton)).status == 503


def test_the_log_says_who_and_how_much_and_not_what() -> None:
    log = io.StringIO()
    app = gateway(log=log)
    secret = {**CHAT, "messages": [{"role": "user", "content": "my secret"}]}
    assert asked("/v1/chat/completions", secret, app, headers={"x-request-id": "r-1"}).headers["x-request-id"] == "r-1"
    asked("/v1/chat/completions", {**secret, "top_k": "my secret"}, app)
    first, second = map(json.loads, log.getvalue().splitlines())
    assert (first["id"], first["model"], first["completion_tokens"]) == ("r-1", "writes", 3)
    assert (second["status"], second["error"]) == (400, "top_k")
    assert "secret" not in log.getvalue()


def test_metrics_have_the_names_that_dashboards_know() -> None:
    app = gateway()
    asked("/v1/chat/completions", {**CHAT, "stream": True}, app)
    asked("/v1/embeddings", {"model": "embeds", "input": "abc"}, app)
    text = b"".join(asked("/metrics", app=app).pieces).decode()
    for line in (
        'vllm:time_to_first_token_seconds_count{model_name="writes"} 1.0',
        'vllm:inter_token_latency_seconds_count{model_name="writes"} 2.0',
        'vllm:e2e_request_latency_seconds_count{model_name="writes"} 1.0',
        'vllm:request_queue_time_seconds_count{model_name="writes"} 1.0',
        'vllm:generation_tokens_total{model_name="writes"} 3.0',
        'vllm:request_success_total{finished_reason="length",model_name="writes"} 1.0',
        'te_request_duration_count{model_name="embeds"} 1.0',
        "build_repo_gateway_unanswered 0.0",
        'build_repo_gateway_responses_total{route="/v1/embeddings",status="200"} 1.0',
    ):
        assert line in text


def test_running_requests_are_counted_by_model() -> None:
    """Regression: a scrape counted itself, so that one request was running where none was, and no model was named."""
    seen: list[tuple[float | None, float | None]] = []

    def running(name: str) -> float | None:
        labels = {"model_name": name, "engine": "0"}
        return app.metrics.registry.get_sample_value("vllm:num_requests_running", labels)

    class Noting(FakeTriton):
        async def infer(self, *arguments: Any) -> Any:
            seen.append((running("embeds"), running("writes")))
            return await super().infer(*arguments)

    app = gateway(Noting())
    assert b"vllm:num_requests_running{" not in b"".join(asked("/metrics", app=app).pieces), "none has been asked for"
    asked("/info", app=app)
    asked("/v1/embeddings", {"model": "embeds", "input": "abc"}, app)
    assert seen == [(1, None)]
    assert asked("/v1/embeddings", {"model": "embeds", "input": "abc", "prompt_name": "x"}, app).status == 400
    assert asked("/v1/chat/completions", {**CHAT, "stream": True}, app, leave_after=1).status == 200
    assert (running("embeds"), running("writes")) == (0, 0)


def test_how_full_caches_are_is_not_said_where_triton_does_not_answer() -> None:
    app = gateway(triton_metrics="http://127.0.0.1:1/metrics")
    answer = asked("/metrics", app=app)
    text = b"".join(answer.pieces).decode()
    assert answer.status == 200
    assert "kv_cache_usage" not in text
    assert "build_repo_gateway_unanswered 0.0" in text


def test_metrics_of_a_triton_that_ends_in_the_midst_of_them_are_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def end_early() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):  # the client may have disconnected
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nbuild_repo_cache_usage{} 0.5\n")

        thread = threading.Thread(target=end_early)
        thread.start()
        port = server.getsockname()[1]
        assert cache_usage(f"http://127.0.0.1:{port}/metrics") == b""
        thread.join()


def test_a_request_is_unanswered_until_its_first_token() -> None:
    seen: list[float | None] = []

    class Noting(FakeTriton):
        async def stream(self, *arguments: Any) -> AsyncGenerator[dict[str, Any], None]:
            seen.append(app.metrics.registry.get_sample_value("build_repo_gateway_unanswered"))
            async for outputs in super().stream(*arguments):
                yield outputs
                seen.append(app.metrics.registry.get_sample_value("build_repo_gateway_unanswered"))

    app = gateway(Noting())
    asked("/v1/chat/completions", {**CHAT, "stream": True}, app)
    assert seen[0] == 1
    assert set(seen[1:]) == {0}
    assert asked("/v1/chat/completions", {**CHAT, "temperature": -1}, app).status == 400
    assert app.metrics.registry.get_sample_value("build_repo_gateway_unanswered") == 0


def test_traces_go_on_to_triton_where_that_is_asked_for() -> None:
    headers = {"traceparent": "00-1-2-01"}
    for forwards, expected in ((True, (("traceparent", "00-1-2-01"),)), (False, ())):
        triton = FakeTriton()
        asked("/v1/chat/completions", CHAT, gateway(triton, forward_traces=forwards), headers=headers)
        assert tuple(triton.metadata[0]) == expected


def test_pages_of_other_origins_may_ask_where_that_is_said() -> None:
    origin = {"origin": "https://a.example", "access-control-request-method": "POST"}
    headers = {**origin, "access-control-request-headers": "content-type"}
    allowed = asked("/v1/embeddings", headers=headers, method="OPTIONS", app=gateway(cors=("https://a.example",)))
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in asked("/v1/embeddings", headers=headers, method="OPTIONS").headers


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("max_tokens is 5000; after a prompt of 1 tokens it can be 1 to 127", 400),
        ("2 sequences wait already and the limit is 2; send the request again later", 429),
        ("the request's time was over after 3 tokens", 504),
        ("this request failed inside the model: EngineFailed: the decode loop failed earlier", 500),
        ("Request for unknown model: 'x' is not found", 503),
        ("Request for unknown model: 'x' has no available versions", 503),
        ("GRPC server is shutting down and has stopped accepting new requests.", 503),
    ],
)
def test_the_text_of_a_streams_error_tells_its_status(message: str, status: int) -> None:
    assert stream_error(message).status == status
