"""OpenAI's own client, tools included."""

from __future__ import annotations

import openai
from checking import WORK, check, report

api = openai.OpenAI(base_url=f"{WORK['gateway']}/v1", api_key="none", max_retries=0)
CHAT = [{"role": "user", "content": "Where is the museum?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]


@check("models")
def _() -> None:
    assert {"writes", "embeds"} <= {model.id for model in api.models.list()}


@check("chat, streamed")
def _() -> None:
    options = {"model": "writes", "messages": CHAT, "max_tokens": 12, "temperature": 0}
    whole = api.chat.completions.create(**options)
    chunks = api.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content


@check("tools: required, and its answer in the next turn")
def _() -> None:
    fields = {"model": "writes", "tools": TOOLS, "max_tokens": 60}
    first = api.chat.completions.create(messages=CHAT, tool_choice="required", **fields).choices[0]
    (call,) = first.message.tool_calls
    assert first.finish_reason == "tool_calls"
    answer = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    turns = [*CHAT, first.message.model_dump(exclude_none=True), answer]
    assert api.chat.completions.create(messages=turns, **fields).choices[0].finish_reason


@check("tools: auto, streamed")
def _() -> None:
    chunks = list(api.chat.completions.create(model="writes", messages=CHAT, tools=TOOLS, max_tokens=12, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


@check("completion of token ids")
def _() -> None:
    options = {"model": "writes", "max_tokens": 4, "temperature": 0}
    answer = api.completions.create(prompt=[[20, 21, 22], [30]], **options)
    assert len(answer.choices) == 2
    assert answer.usage.prompt_tokens == 4


@check("embeddings")
def _() -> None:
    assert len(api.embeddings.create(model="embeds", input=["a", "b"]).data) == 2


report()
