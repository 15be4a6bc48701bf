"""Serve POST /v1/chat/completions: messages through the model's own template, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.generation.answer import Delta, DeltaToolCall, Part, ReasoningText
from builder.serving.gateway.generation.chat import (
    ChatCompletionRequest,
    CompleteAnswer,
    PreparedChat,
    complete_answers,
    deltas,
    read_chat,
)
from builder.serving.gateway.generation.fields import usage_member
from builder.serving.gateway.generation.generate import token_logprob
from builder.serving.gateway.http_responses import DONE, dumps, event

REASONING = ("reasoning_content", "reasoning")  # SGLang's and DeepSeek's name, then vLLM's since 0.12


async def create_chat_completion(context: RequestContext) -> Any:
    """Answer a chat with a completion, or a stream of its chunks."""
    body: ChatCompletionRequest = context.body
    chat = await read_chat(context, body)
    if body.stream:
        return _events(chat)
    answers = await complete_answers(chat)
    return {
        **_head(chat, "chat.completion"),
        "choices": [_choice(index, answer, body) for index, answer in enumerate(answers)],
        "usage": chat.usage.body,
    }


def _choice(index: int, answer: CompleteAnswer, body: ChatCompletionRequest) -> dict[str, Any]:
    content = answer.text if answer.text or not (answer.calls or answer.reasoning) else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message |= dict.fromkeys(REASONING, answer.reasoning)
    if answer.calls:
        message["tool_calls"] = [_call_body(call) for call in answer.calls]
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(answer.logprobs) if body.logprobs else None,
        "finish_reason": answer.finish_reason,
    }


async def _events(chat: PreparedChat) -> AsyncGenerator[bytes, None]:
    """Yield the chunks. Their common part is serialised once: a stream has a chunk per token."""
    body, head = chat.body, _head(chat, "chat.completion.chunk")
    begin, choices = f"data: {dumps(head)[:-1]}," + '"choices":[', dict[int, Choice]()
    async with aclosing(deltas(chat)) as stream:
        async for delta in stream:
            for choice in choices.setdefault(delta.index, Choice()).chunks(delta):
                yield f"{begin}{choice}]{usage_member(body, chat.usage)}}}\n\n".encode()
    if body.includes_usage:
        yield event({**head, "choices": [], "usage": chat.usage.body})
    yield DONE


class Choice:
    """One of n answers in chunks: of text and reasoning, and of each tool call once it is complete."""

    def __init__(self) -> None:
        self.has_begun = False
        self.logprobs: list[dict[str, Any]] | None = None  # of tokens whose text is held back

    def chunks(self, delta: Delta) -> list[str]:
        """Return the choices for `delta` as JSON; none if all of it is held back."""
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        members = [_delta(part) for part in delta.parts]
        if not self.has_begun:
            first = members[0] if members else '"content":""'
            self.has_begun, members = True, ['"role":"assistant",' + first, *members[1:]]
        elif delta.finish_reason and not members:
            members = [""]
        ends = [',"logprobs":null,"finish_reason":null'] * len(members)
        if members:
            logprobs = "null" if self.logprobs is None else dumps(_logprobs(self.logprobs))
            reason = f'"{delta.finish_reason}"' if delta.finish_reason else "null"
            ends[-1], self.logprobs = f',"logprobs":{logprobs},"finish_reason":{reason}', None
        return [f'{{"index":{delta.index},"delta":{{{one}}}{end}}}' for one, end in zip(members, ends, strict=True)]


def _delta(part: Part) -> str:
    """Return the members of a delta."""
    if isinstance(part, str):
        return f'"content":{dumps(part)}'
    if isinstance(part, ReasoningText):
        return ",".join(f'"{name}":{dumps(part.text)}' for name in REASONING)
    return f'"tool_calls":{dumps([{"index": part.number, **_call_body(part)}])}'


def _call_body(call: DeltaToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _head(chat: PreparedChat, kind: str) -> dict[str, Any]:
    record = chat.context.record
    return {"id": f"chatcmpl-{record.id}", "object": kind, "created": record.created_at, "model": chat.model.label}


def _logprobs(tokens: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": [{**_token(token), "top_logprobs": [_token(top) for top in token["top"]]} for token in tokens]}


def _token(token: Mapping[str, Any]) -> dict[str, Any]:
    text = token["text"]
    known = "\ufffd" not in text  # the text of a partial character does not show its bytes
    return {"token": text, "logprob": token_logprob(token), "bytes": list(text.encode()) if known else None}
