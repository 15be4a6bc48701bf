"""POST /v1/chat/completions: options, templates, log-probabilities and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving.gateway.fake_triton import FakeTriton
from tests.serving.gateway.requests import CHAT, fetch, gateway


def test_chat_whole_and_streamed_agree() -> None:
    whole = fetch("/v1/chat/completions", {**CHAT, "n": 2}).json
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["0 1 2 "] * 2
    assert whole["usage"]["completion_tokens"] == 6
    streamed = fetch("/v1/chat/completions", {**CHAT, "stream": True, "stream_options": {"include_usage": True}})
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
def test_continuous_usage_stats_count_in_every_chunk(path: str, body: dict[str, Any]) -> None:
    """Serve vLLM's continuous_usage_stats, which guidellm asks for."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, usage, _done = fetch(path, body).events
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == usage["usage"]["completion_tokens"] == 3
    assert chunks[0]["usage"]["completion_tokens"] == 1
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {usage["usage"]["prompt_tokens"]} != {0}
    older = {"model": "writes", "prompt": "a", "stream": True, "stream_options": body["stream_options"]}
    assert fetch("/v1/completions", older).error["param"] == "stream_options"


def test_sampling_options_become_model_inputs() -> None:
    triton = FakeTriton()
    options = {"seed": 5, "stop": "x", "logit_bias": {"42": -5}, "top_k": 3, "max_completion_tokens": 2, "user": "me"}
    body = {"model": "writes", "messages": CHAT["messages"], **options}
    assert fetch("/v1/chat/completions", body, gateway(triton)).status == 200
    (inputs,) = triton.requests
    assert inputs["random_seed"] == [5]
    assert inputs["stop_words"] == ["x"]
    assert json.loads(inputs["logit_bias"][0]) == {"42": -5}
    assert (inputs["top_k"], inputs["max_tokens"]) == ([3], [2])
    assert "user" not in inputs


def test_chat_template_options_reach_the_model() -> None:
    triton = FakeTriton()
    messages = [*CHAT["messages"], {"role": "assistant", "content": "A"}]
    says = {"chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True}
    for path, more in (("/v1/chat/completions", {"reasoning_effort": "low"}), ("/tokenize", {})):
        body = {"model": "guided", "messages": messages, "add_generation_prompt": False, **says, **more}
        assert fetch(path, body, gateway(triton)).status == 200
        sent = triton.requests[-1]
        assert json.loads(sent["chat_template_kwargs"][0]) == {"enable_thinking": False}
        assert sent["continue_final_message"] == [True]
        assert "add_generation_prompt" not in sent
        for wrong in ({"add_generation_prompt": True}, {"continue_final_message": False}):
            assert fetch(path, {**body, **wrong}).error["param"] == "add_generation_prompt"
        older = fetch("/v1/chat/completions", {**CHAT, **says})
        assert (older.status, older.error["param"]) == (400, "chat_template_kwargs")
    assert triton.requests[0]["reasoning_effort"] == ["low"]


def test_logprobs_have_openai_shape() -> None:
    body = {**CHAT, "max_tokens": 1, "logprobs": True, "top_logprobs": 1}
    (token,) = fetch("/v1/chat/completions", body).json["choices"][0]["logprobs"]["content"]
    assert token == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [{"token": "x", "logprob": -9999.0, "bytes": [120]}],
    }
    completion = fetch("/v1/completions", {"model": "writes", "prompt": "a", "max_tokens": 1, "logprobs": 1}).json
    assert completion["choices"][0]["logprobs"]["token_logprobs"] == [-0.5]
    assert completion["choices"][0]["logprobs"]["top_logprobs"] == [{"x": -9999.0, "a": -0.5}], "the token's own too"


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
def test_chat_refusal_names_the_field(more: dict[str, Any], param: str) -> None:
    refused = fetch("/v1/chat/completions", {**CHAT, **more})
    assert (refused.status, refused.error["param"]) == (400, param), refused.error
    assert refused.error["type"] == "invalid_request_error"


def test_chat_accepts_options_without_effect() -> None:
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
    assert fetch("/v1/chat/completions", body).status == 200


def test_message_parts_are_joined_for_templates_without_parts() -> None:
    triton = FakeTriton()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for model, wanted in (("writes", "a\nb"), ("guided", parts)):
        body = {"model": model, "messages": [{"role": "user", "content": parts}]}
        assert fetch("/v1/chat/completions", body, gateway(triton)).status == 200
        assert json.loads(triton.requests[-1]["messages"][0])[0]["content"] == wanted
    tokens = fetch("/tokenize", {"model": "guided", "messages": body["messages"]}, gateway(triton))
    assert tokens.status == 200
    assert json.loads(triton.requests[-1]["messages"][0])[0]["content"] == parts


def test_message_parts_are_joined_for_roles_without_parts() -> None:
    """Regression: templates with parts for a user wrote Python's list for a tool or the system, or one part alone."""
    triton = FakeTriton()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"model": "guided", "messages": [{"role": role, "content": parts} for role in ("developer", "user", "tool")]}
    assert fetch("/v1/chat/completions", body, gateway(triton)).status == 200
    sent = json.loads(triton.requests[-1]["messages"][0])
    assert sent == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": parts},
        {"role": "tool", "content": "a\nb"},
    ]
