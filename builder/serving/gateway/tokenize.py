"""POST /tokenize, /detokenize and /decode: the tokens of a text, and the text of tokens.

The models tokenise, by their input `tokenize`. A body with `inputs` is TEI's, one with `prompt` or `messages` vLLM's.
Sources: https://huggingface.github.io/text-embeddings-inference, and vLLM's entrypoints/serve/tokenize/protocol.py.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from builder.serving.gateway.call import Call
from builder.serving.gateway.endpoint import checked
from builder.serving.gateway.errors import ApiError, bad_field
from builder.serving.gateway.generation.asking import make_request
from builder.serving.gateway.generation.messages import MOST_MESSAGES, Message, Templated, as_template
from builder.serving.gateway.models import Model
from builder.serving.gateway.responses import dumps, loads
from builder.serving.gateway.rows import ask_rows
from builder.serving.gateway.tei import tei_errors

TOKENIZE = "tokenize"
Ids = Annotated[list[int], Field(min_length=1)]


class TeiBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    inputs: str | Annotated[list[str], Field(min_length=1, max_length=4096)]
    add_special_tokens: bool = True
    prompt_name: str | None = None


class Body(Templated):
    """vLLM's body. A chat is rendered with the checkpoint's template, as for an answer."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DecodeBody(BaseModel):
    """TEI's body."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    ids: Ids | Annotated[list[Ids], Field(min_length=1, max_length=4096)]
    skip_special_tokens: bool = True


class DetokenizeBody(BaseModel):
    """vLLM's body."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    tokens: Ids


async def tokenize(call: Call) -> Any:
    """Serve POST /tokenize, in TEI's or vLLM's shape."""
    fields = call.body.model_extra
    if "inputs" in fields:
        with tei_errors():
            return await _tokenize_texts(replace(call, body=checked(TeiBody, fields)))
    return await _tokenize_prompt(replace(call, body=checked(Body, fields)))


async def decode(call: Call) -> list[str]:
    """Serve POST /decode: the text of each list of token ids."""
    body: DecodeBody = call.body
    model = await call.model_for("that takes token ids", _detokenizes, body.model)
    lists: list[Any] = [body.ids] if isinstance(body.ids[0], int) else body.ids
    skip = {"skip_special_tokens": body.skip_special_tokens}
    return [(await prompt_tokens(call, model, {"input_ids": ids, **skip}))[0] for ids in lists]


async def detokenize(call: Call) -> dict[str, str]:
    """Serve POST /detokenize: the text of token ids, special tokens included."""
    body: DetokenizeBody = call.body
    model = await call.model_for("that takes token ids", _detokenizes, body.model)
    text, _ = await prompt_tokens(call, model, {"input_ids": body.tokens, "skip_special_tokens": False})
    return {"prompt": text}


async def _tokenize_texts(call: Call) -> list[list[dict[str, Any]]]:
    body: TeiBody = call.body
    model = await call.model_for("that tells tokens", _tokenizes, body.model)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    prompt = {} if body.prompt_name is None else {"prompt_name": body.prompt_name}
    lists = await _of_texts(call, model, texts, prompt)
    return [[token for token in tokens if body.add_special_tokens or not token["special"]] for tokens in lists]


async def _tokenize_prompt(call: Call) -> dict[str, Any]:
    body: Body = call.body
    if (body.prompt is None) == (body.messages is None):
        raise bad_field("prompt", "send prompt or messages, or inputs as TEI's clients do")
    model = await call.model_for("that tells tokens", _tokenizes, body.model)
    if body.prompt is not None:
        (tokens,) = await _of_texts(call, model, [body.prompt], {})
    else:
        tokens = await _of_chat(call, model, body)
    if body.add_special_tokens is False:
        tokens = [token for token in tokens if not token["special"]]
    return {
        "count": len(tokens),
        "max_model_len": model.max_total_tokens or model.max_input_length,
        "tokens": [token["id"] for token in tokens],
        "token_strs": [token["text"] for token in tokens] if body.return_token_strs else None,
    }


async def _of_texts(call: Call, model: Model, texts: list[str], options: dict[str, str]) -> list[list[dict[str, Any]]]:
    model.refuse_others(options)
    if model.streams:
        return [(await prompt_tokens(call, model, {"text_input": text, **options}))[1] for text in texts]
    rows = await ask_rows(call, model, [{"text_input": [text]} for text in texts], {TOKENIZE: True, **options})
    return [loads(row["tokens"][0]) for row in rows]


async def _of_chat(call: Call, model: Model, body: Body) -> list[dict[str, Any]]:
    if "messages" not in model.inputs or not model.chats:
        raise bad_field("messages", f"{model.name} has no chat template; send prompt")
    body.refuse_prompts()
    inputs: dict[str, Any] = {"messages": as_template(model, body.messages or [])}
    if body.tools:
        inputs["tools"] = dumps(body.tools)
    if body.chat_template_kwargs:
        inputs["chat_template_kwargs"] = dumps(body.chat_template_kwargs)
    if body.continue_final_message:
        inputs["continue_final_message"] = True
    model.refuse_others(inputs)
    return (await prompt_tokens(call, model, inputs))[1]


async def prompt_tokens(call: Call, model: Model, inputs: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return the text and the tokens of one prompt, from a generating model that generates nothing for it."""
    request = make_request(call, model, {**inputs, TOKENIZE: True})
    async with aclosing(call.gateway.triton.stream(request, call.metadata)) as stream:
        answers = [outputs async for outputs in stream]
    if len(answers) != 1:
        raise ApiError(500, f"{model.name} answered {len(answers)} times what its tokens are; once was expected")
    return answers[0]["text_output"].strings()[0], loads(answers[0]["tokens"].strings()[0])


def _tokenizes(model: Model) -> bool:
    return TOKENIZE in model.inputs


def _detokenizes(model: Model) -> bool:
    return {TOKENIZE, "input_ids"} <= set(model.inputs)
