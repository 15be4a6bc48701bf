"""Convert OpenAI's messages of a chat for chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.http_responses import dumps, loads
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.validation import ExtensibleBody

MAX_MESSAGES = 4096


class Message(ExtensibleBody):
    """One message. Extra keys, such as name or reasoning_content, go to the template unchanged."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatTemplateFields(BaseModel):
    """Fields of a chat that control how its template is rendered."""

    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    def refuse_prompts(self) -> None:
        """Raise ApiError unless the prompt ends where an answer begins, or within the message that it continues."""
        if self.add_generation_prompt is not None and self.add_generation_prompt is bool(self.continue_final_message):
            raise bad_field(
                "add_generation_prompt",
                "add_generation_prompt and continue_final_message are both "
                f"{str(self.add_generation_prompt).lower()}; expected one of them: an answer begins a message or "
                "continues the last one",
            )


def as_template(model: ServedModel, messages: Sequence[Message]) -> str:
    """Return the messages as JSON for the template of `model`. Raises ApiError for content that it cannot render."""
    return dumps([_as_template(number, message, model.part_roles) for number, message in enumerate(messages)])


def _as_template(number: int, message: Message, part_roles: Sequence[str]) -> dict[str, Any]:
    """Return one message: developer becomes system, and text parts are joined unless its role is in `part_roles`."""
    role = "system" if message.role == "developer" else message.role
    content = message.content
    if isinstance(content, list):
        texts = [_text(number, part) for part in content]
        content = content if role in part_roles else "\n".join(texts)
    rendered = {**(message.model_extra or {}), "role": role, "content": content}
    if message.tool_calls:
        rendered["tool_calls"] = [_earlier_call(at, call) for at, call in enumerate(message.tool_calls)]
    return rendered


def _text(number: int, part: Mapping[str, Any]) -> str:
    text = part.get("text")
    if part.get("type") != "text" or not isinstance(text, str):
        raise bad_field("messages", f"messages[{number}] has a part that is not text; the models read text alone")
    return text


def _earlier_call(number: int, call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of an earlier answer in the templates' form; OpenAI's clients send its arguments as text.

    Source: https://huggingface.co/docs/transformers/chat_extras
    """
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise bad_field("messages", f"tool_calls[{number}] of a message has no function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise bad_field("messages", f"the arguments of tool_calls[{number}] are not JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise bad_field("messages", f"the arguments of tool_calls[{number}] are not a JSON object")
    return {**call, "function": {**function, "arguments": arguments}}
