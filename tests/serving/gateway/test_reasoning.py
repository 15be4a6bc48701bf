"""Reasoning before an answer is told apart from it, however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest

from builder.serving.gateway.generation.answer import ReasoningMarks, ReasoningParser, ReasoningText
from tests.serving.gateway.fake_triton import THOUGHT, FakeTriton
from tests.serving.gateway.requests import fetch, gateway
from tests.serving.gateway.test_chat_tools import LOOK_UP, TOOLS

MARKS = ReasoningMarks("<think>", "</think>", special=False)
CHAT: dict[str, Any] = {"model": "thinks", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 64}


def read(text: str, size: int, opened: bool = False) -> tuple[str, str]:
    """Return the reasoning and the rest of `text`, which comes in pieces of `size` characters."""
    thoughts = ReasoningParser(MARKS)
    thoughts.opened = opened
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    parts = [part for piece in pieces for part in thoughts.push(piece)] + thoughts.push("", last=True)
    assert all(part.text if isinstance(part, ReasoningText) else part for part in parts), "nothing empty is told"
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningText))
    return reasoning, "".join(part for part in parts if isinstance(part, str))


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100])
@pytest.mark.parametrize(
    ("text", "opened", "wanted"),
    [
        ("<think>\na < b\n\nc\n</think>\n\nYes.\n", False, ("a < b\n\nc", "Yes.\n")),
        (" \n<think>a</think>b", False, ("a", "b")),
        ("a\n</think>\n\nb", True, ("a", "b")),
        ("<think>\na</think>b", True, ("a", "b")),
        ("\n\n</think>\n\nb", True, ("", "b")),
        ("<think>cut </thi", False, ("cut </thi", "")),
        ("<think></think></think>b", False, ("", "</think>b")),
        ("No <think>marks</think>.", False, ("", "No <think>marks</think>.")),
        ("\n<thi", False, ("", "\n<thi")),
        ("<thing>", False, ("", "<thing>")),
        ("", False, ("", "")),
        ("", True, ("", "")),
    ],
)
def test_reasoning_parser_splits_the_beginning_only(
    text: str, size: int, opened: bool, wanted: tuple[str, str]
) -> None:
    assert read(text, size, opened) == wanted


@pytest.mark.parametrize("effort", ["low", "high"], ids=["the model opens it", "the prompt opens it"])
def test_chat_separates_reasoning_from_the_answer(effort: str) -> None:
    triton = FakeTriton()
    body = {**CHAT, "reasoning_effort": effort, "n": 2}
    for choice in fetch("/v1/chat/completions", body, gateway(triton)).json["choices"]:
        message = choice["message"]
        assert (message["content"], message["reasoning_content"]) == ("It is not.", THOUGHT)
        assert message["reasoning"] == THOUGHT, "vLLM's name"
    assert triton.requests[0]["skip_special_tokens"] == [False], "the marks of this model are special tokens"
    *chunks, _done = fetch("/v1/chat/completions", {**body, "stream": True}).events
    choices = [chunk["choices"][0] for chunk in chunks]
    for index in (0, 1):
        deltas = [choice["delta"] for choice in choices if choice["index"] == index]
        assert "".join(delta.get("content", "") for delta in deltas) == "It is not."
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
        assert deltas[0]["role"] == "assistant"
        assert not any("content" in delta and "reasoning" in delta for delta in deltas[1:])


def test_answer_cut_in_its_reasoning_has_no_content() -> None:
    (choice,) = fetch("/v1/chat/completions", {**CHAT, "max_tokens": 2}).json["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
    assert THOUGHT.startswith(choice["message"]["reasoning"])


def test_tool_calls_follow_the_reasoning() -> None:
    body = {**CHAT, "tools": TOOLS}
    (choice,) = fetch("/v1/chat/completions", body).json["choices"]
    message = choice["message"]
    assert [call["function"] for call in message["tool_calls"]] == [LOOK_UP, LOOK_UP]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, "I look. ")
    *chunks, _done = fetch("/v1/chat/completions", {**body, "stream": True}).events
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert sum(len(delta.get("tool_calls", [])) for delta in deltas) == 2
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_earlier_reasoning_reaches_the_template() -> None:
    triton = FakeTriton()
    said = {"role": "assistant", "content": "No.", "reasoning_content": "hm"}
    body = {**CHAT, "messages": [*CHAT["messages"], said, *CHAT["messages"]]}
    assert fetch("/v1/chat/completions", body, gateway(triton)).status == 200
    assert json.loads(triton.requests[0]["messages"][0])[1] == said
