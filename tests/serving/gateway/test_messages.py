"""/v1/messages, asked by Anthropic's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from builder.serving.gateway.errors import ApiError
from tests.serving.gateway.fake_triton import THOUGHT, FakeTriton
from tests.serving.gateway.requests import fetch, gateway
from tests.serving.gateway.serving import served
from tests.serving.gateway.test_chat_tools import CITY

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
ASKS: dict[str, Any] = {"model": "writes", "messages": HELLO, "max_tokens": 3}
TOOL = {"name": "look_up", "description": "...", "input_schema": CITY}
CALLS: dict[str, Any] = {"model": "thinks", "messages": HELLO, "max_tokens": 64, "tools": [TOOL]}


@pytest.fixture(scope="module")
def triton() -> FakeTriton:
    return FakeTriton()


@pytest.fixture(scope="module")
def url(triton: FakeTriton) -> Iterator[str]:
    with served(triton, keys=(("me", "secret"),)) as url:
        yield url


@pytest.fixture(scope="module")
def api(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="secret", max_retries=0) as api:
        yield api


def test_messages_answer_a_conversation(api: anthropic.Anthropic, triton: FakeTriton) -> None:
    system: list[Any] = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    answer: Any = api.messages.create(
        **ASKS, system=system, stop_sequences=["x"], extra_body={"temperature": 0, "top_k": 5}
    )
    assert [block.text for block in answer.content] == ["0 1 2 "]
    assert (answer.stop_reason, answer.role, answer.model) == ("max_tokens", "assistant", "writes")
    assert (answer.usage.output_tokens, answer.usage.input_tokens > 0) == (3, True)
    sent = triton.requests[-1]
    assert json.loads(sent["messages"][0]) == [{"role": "system", "content": "Be brief."}, *HELLO]
    assert (sent["stop_words"], sent["top_k"], sent["temperature"]) == (["x"], [5], [0.0])


def test_messages_events_follow_anthropic_order(api: anthropic.Anthropic) -> None:
    with api.messages.create(**CALLS, stream=True) as stream:
        events: list[Any] = list(stream)
    types = [event.type for event in events]
    once = [kind for at, kind in enumerate(types) if not at or kind != types[at - 1]]  # deltas as one
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", *(block * 4), "message_delta", "message_stop"]
    assert (events[-2].delta.stop_reason, events[-2].usage.output_tokens) == ("tool_use", 64)
    with api.messages.stream(**CALLS) as whole:
        final: Any = whole.get_final_message()
    assert [part.type for part in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (final.content[0].thinking, final.content[1].text) == (THOUGHT, "I look. ")
    assert final.content[2].input == {"city": "Oslo"}
    raw = b"".join(fetch("/v1/messages", {**ASKS, "stream": True}).pieces).decode()
    assert "event: ping\n" in raw


def test_messages_accept_thinking_and_calls_of_earlier_turns(api: anthropic.Anthropic, triton: FakeTriton) -> None:
    answer: Any = api.messages.create(**CALLS)
    assert answer.stop_reason == "tool_use"
    thought, said, call, other = answer.content
    assert (thought.thinking, said.text, call.input) == (THOUGHT, "I look. ", {"city": "Oslo"})
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain"}]},
        {"type": "tool_result", "tool_use_id": other.id, "content": "sun"},
        {"type": "text", "text": "And?"},
    ]
    turns = [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    api.messages.create(**{**CALLS, "messages": [*HELLO, *turns]})
    _user, assistant, first, second, last = json.loads(triton.requests[-1]["messages"][0])
    assert (assistant["reasoning_content"], assistant["content"]) == (THOUGHT, "I look. ")
    assert [c["function"]["arguments"] for c in assistant["tool_calls"]] == [{"city": "Oslo"}] * 2
    assert first == {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    assert (second["content"], last) == ("sun", {"role": "user", "content": [{"type": "text", "text": "And?"}]})


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "look_up"}])
def test_messages_tool_choice_requires_a_call(choice: Any, api: anthropic.Anthropic, triton: FakeTriton) -> None:
    answer = api.messages.create(**{**CALLS, "model": "guided"}, tool_choice=choice)
    assert [block.type for block in answer.content] == ["tool_use"]
    assert "guide" in triton.requests[-1]


def test_messages_thinking_reaches_the_template(api: anthropic.Anthropic, triton: FakeTriton) -> None:
    asks = {**ASKS, "model": "thinks"}
    cases: list[tuple[dict[str, Any], list[str] | None]] = [
        ({"thinking": {"type": "disabled"}}, ["none"]),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, ["medium"]),
        ({"thinking": {"type": "adaptive"}}, None),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, ["low"]),
    ]
    for more, effort in cases:
        api.messages.create(**asks, **more)
        assert triton.requests[-1].get("reasoning_effort") == effort
    api.messages.create(**ASKS, thinking={"type": "disabled"})
    assert "reasoning_effort" not in triton.requests[-1], "a model that does not reason"


def test_messages_continue_a_last_assistant_message(api: anthropic.Anthropic, triton: FakeTriton) -> None:
    api.messages.create(**{**ASKS, "model": "guided", "messages": [*HELLO, {"role": "assistant", "content": "A"}]})
    assert triton.requests[-1]["continue_final_message"] == [True]


def test_messages_output_format_guides_the_answer(api: anthropic.Anthropic, triton: FakeTriton) -> None:
    form: Any = {"type": "json_schema", "schema": CITY}
    api.messages.create(**{**ASKS, "model": "guided"}, output_config={"format": form})
    assert "json_schema" in json.loads(triton.requests[-1]["guide"][0])


def test_messages_count_tokens(api: anthropic.Anthropic) -> None:
    counted = api.messages.count_tokens(model="guided", messages=HELLO, system="Be brief.")
    shorter = api.messages.count_tokens(model="guided", messages=HELLO)
    assert counted.input_tokens > shorter.input_tokens > 5
    assert fetch("/v1/messages/count_tokens", {"model": "writes", "messages": HELLO}).status == 400


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "expected user or assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "block of type 'image'"),
        ({"messages": [{"role": "user", "content": 5}]}, "neither text"),
        ({"messages": [{"role": "user", "content": []}]}, "has no content"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking"}]}]}, "redacted_thinking"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"tool_choice": {"type": "some"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "not known to reason"),
        ({"thinking": {"type": "other"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"max_tokens": 65}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"container": "x"}, "container"),
        ({"n": 2}, "n is not"),
        ({"model": "embeds"}, "does not generate text"),
        ({"stream": True, "max_tokens": 65}, "max_tokens"),
    ],
)
def test_messages_refusals_have_anthropic_shape(more: dict[str, Any], says: str) -> None:
    refused = fetch("/v1/messages", {**ASKS, **more})
    assert (refused.status, refused.json["type"]) == (400, "error")
    assert refused.json["error"]["type"] == "invalid_request_error"
    assert says in refused.json["error"]["message"]


def test_messages_errors_match_the_client(api: anthropic.Anthropic, url: str) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        api.messages.create(**{**ASKS, "model": "other"})
    assert missing.value.type == "not_found_error"
    with (
        anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError) as denied,
    ):
        stranger.messages.create(**ASKS)
    assert denied.value.type == "authentication_error"
    with anthropic.Anthropic(base_url=url, auth_token="secret", max_retries=0) as bearer:
        assert bearer.messages.create(**ASKS).content


def test_messages_stream_that_breaks_off_ends_with_an_error() -> None:
    class Breaking(FakeTriton):
        async def stream(self, request: Any, metadata: Any = ()) -> Any:
            async for outputs in super().stream(request, metadata):
                yield outputs
                raise ApiError(503, "the model is gone")

    with (
        served(Breaking()) as url,
        anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as api,
        api.messages.create(**ASKS, stream=True) as stream,
        pytest.raises(anthropic.APIStatusError, match="the model is gone"),
    ):
        list(stream)


def test_messages_stream_past_its_time_limit_ends_with_an_error() -> None:
    """Regression: the event had no name, and clients ignore events without one."""
    triton = FakeTriton()
    triton.may_answer = asyncio.Event()  # but for the first token
    streamed = fetch("/v1/messages", {**ASKS, "max_tokens": 64, "stream": True}, gateway(triton, timeout_s=2))
    last = b"".join(streamed.pieces).decode().rstrip().split("\n\n")[-1]
    assert streamed.status == 200
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.split("data: ")[1])["error"]["type"] == "timeout_error"
