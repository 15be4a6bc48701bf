"""/v1/responses, asked by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from builder.serving.gateway.errors import ApiError
from tests.serving.gateway.fake_triton import THOUGHT, FakeTriton
from tests.serving.gateway.requests import fetch, gateway
from tests.serving.gateway.serving import served
from tests.serving.gateway.test_chat_tools import CITY

ASKS: dict[str, Any] = {"model": "writes", "input": "Hello", "max_output_tokens": 3}
TOOL = {"type": "function", "name": "look_up", "description": "...", "parameters": CITY, "strict": True}
CALLS: dict[str, Any] = {"model": "thinks", "input": "Hello", "tools": [TOOL], "max_output_tokens": 64}


@pytest.fixture(scope="module")
def triton() -> FakeTriton:
    return FakeTriton()


@pytest.fixture(scope="module")
def api(triton: FakeTriton) -> Iterator[openai.OpenAI]:
    with served(triton) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        yield api


def test_responses_answer_a_text(api: openai.OpenAI, triton: FakeTriton) -> None:
    answer = api.responses.create(**ASKS, instructions="Be brief.", temperature=0, metadata={"a": "b"}, store=False)
    assert answer.output_text == "0 1 2 "
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.output_tokens, answer.usage.total_tokens) == (3, answer.usage.input_tokens + 3)
    assert (answer.store, answer.instructions, answer.metadata) == (False, "Be brief.", {"a": "b"})
    sent = json.loads(triton.requests[-1]["messages"][0])
    assert sent == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert api.responses.create(**ASKS).store is False, "the client does not say"


def test_responses_events_follow_openai_order(api: openai.OpenAI) -> None:
    events = list(api.responses.create(**CALLS, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    types = [event.type.removeprefix("response.") for event in events]
    text = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    once = [kind for at, kind in enumerate(types) if not at or kind != types[at - 1]]  # deltas as one
    assert once == [
        *("created", "in_progress", "output_item.added"),
        *("content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done"),
        *("output_item.done", "output_item.added", *text, "output_item.done"),
        *(*call, *call, "completed"),
    ]
    assert events[0].response.output == []
    final = events[-1].response
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in final.output]
    assert len({item.id for item in final.output}) == 4


def test_responses_contain_reasoning_and_calls(api: openai.OpenAI, triton: FakeTriton) -> None:
    answer = api.responses.create(**CALLS, include=["reasoning.encrypted_content"], reasoning={"effort": "low"})
    thought, said, call, _second = answer.output
    assert (thought.content[0].text, said.content[0].text) == (THOUGHT, "I look. ")
    assert (call.name, json.loads(call.arguments)) == ("look_up", {"city": "Oslo"})
    assert answer.status == "completed"
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    asks = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    again = [*asks, *(item.to_dict() for item in answer.output), *outputs]
    api.responses.create(**{**CALLS, "input": again})
    _user, assistant, tool = json.loads(triton.requests[-1]["messages"][0])
    assert (assistant["reasoning_content"], assistant["content"]) == (THOUGHT, "I look. ")
    assert [c["function"]["arguments"] for c in assistant["tool_calls"]] == [{"city": "Oslo"}] * 2
    assert tool == {"role": "tool", "tool_call_id": call.call_id, "content": "rain"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "look_up"}])
def test_responses_tool_choice_requires_a_call(choice: Any, api: openai.OpenAI, triton: FakeTriton) -> None:
    answer = api.responses.create(**{**CALLS, "model": "guided"}, tool_choice=choice)
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "look_up")
    assert "guide" in triton.requests[-1]


class City(BaseModel):
    city: str


def test_responses_text_format_guides_the_answer(
    api: openai.OpenAI, triton: FakeTriton, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "said", '{"city": "Oslo"}')
    answer = api.responses.parse(**{**ASKS, "model": "guided", "max_output_tokens": 20}, text_format=City)
    assert answer.output_parsed == City(city="Oslo")
    guide = json.loads(triton.requests[-1]["guide"][0])["json_schema"]
    assert (guide["properties"]["city"]["type"], guide["additionalProperties"]) == ("string", False)
    with api.responses.stream(**{**ASKS, "model": "guided", "max_output_tokens": 20}, text_format=City) as stream:
        for _event in stream:
            pass
    monkeypatch.undo()
    api.responses.create(**{**ASKS, "model": "guided"}, text={"format": {"type": "json_object"}})
    assert json.loads(triton.requests[-1]["guide"][0]) == {"json_object": True}


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 2}, "n"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 65}, "max_output_tokens"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{"}]}, "messages"),
        ({"input": [{"content": "x"}]}, "input"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"other": 1}, "other"),
        ({"stream": True, "max_output_tokens": 65}, "max_output_tokens"),
    ],
)
def test_responses_refusal_names_the_field(more: dict[str, Any], param: str) -> None:
    refused = fetch("/v1/responses", {**ASKS, **more})
    assert refused.status == 400
    assert refused.error["param"] in (param, "input" if param == "messages" else param), refused.error


def test_responses_accept_options_without_effect() -> None:
    body = {**ASKS, "store": None, "truncation": "disabled", "background": False, "text": {"format": {"type": "text"}}}
    more = {"stream_options": {"include_obfuscation": False}, "user": "me", "tools": [], "tool_choice": "auto"}
    assert fetch("/v1/responses", {**body, **more}).status == 200
    triton = FakeTriton()
    assert fetch("/v1/responses", {**ASKS, "top_k": 5}, gateway(triton)).status == 200
    assert triton.requests[0]["top_k"] == [5]


def test_responses_stream_that_breaks_off_has_failed() -> None:
    class Breaking(FakeTriton):
        async def stream(self, request: Any, metadata: Any = ()) -> Any:
            async for outputs in super().stream(request, metadata):
                yield outputs
                raise ApiError(503, "the model is gone")

    lines = b"".join(fetch("/v1/responses", {**ASKS, "stream": True}, gateway(Breaking())).pieces).decode()
    last = json.loads(lines.strip().split("data: ")[-1])
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["message"] == "the model is gone"
