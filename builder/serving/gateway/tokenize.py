"""Serve POST /tokenize, /detokenize and /decode: the tokens of a text, and the text of tokens.

The models tokenise, by their input `tokenize`. A body with `inputs` is TEI's, one with `prompt` or `messages` vLLM's.
Sources: https://huggingface.github.io/text-embeddings-inference, and vLLM's entrypoints/serve/tokenize/protocol.py.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import Annotated, Any

from pydantic import Field

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.encoders import MAX_TEXTS, Texts, as_list, infer_rows
from builder.serving.gateway.errors import ApiError, bad_field
from builder.serving.gateway.generation.chat import MAX_MESSAGES, ChatTemplateFields, Message, as_template
from builder.serving.gateway.generation.generate import make_request
from builder.serving.gateway.http_responses import dumps, loads
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.tei import tei_errors
from builder.serving.gateway.validation import StrictBody

TOKENIZE = "tokenize"  # input that requests tokens
Ids = Annotated[list[int], Field(min_length=1)]


class TeiTokenizeRequest(StrictBody):
    model: str | None = None
    inputs: str | Texts
    add_special_tokens: bool = True
    prompt_name: str | None = None


class TokenizeRequest(ChatTemplateFields, StrictBody):
    """vLLM's body. A chat is rendered with the checkpoint's template, as for an answer."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TeiDecodeRequest(StrictBody):
    """TEI's body."""

    model: str | None = None
    ids: Ids | Annotated[list[Ids], Field(min_length=1, max_length=MAX_TEXTS)]
    skip_special_tokens: bool = True


class DetokenizeRequest(StrictBody):
    """vLLM's body."""

    model: str | None = None
    tokens: Ids


async def tokenize(context: RequestContext) -> Any:
    """Serve POST /tokenize, in TEI's or vLLM's shape."""
    if "inputs" in context.body.model_extra:
        with tei_errors():
            return await _tokenize_texts(context.with_body(TeiTokenizeRequest))
    return await _tokenize_prompt(context.with_body(TokenizeRequest))


async def decode(context: RequestContext) -> list[str]:
    """Serve POST /decode: the text of each list of token ids."""
    body: TeiDecodeRequest = context.body
    model = await _detokenizer(context, body.model)
    lists: list[Any] = [body.ids] if isinstance(body.ids[0], int) else body.ids
    skip = {"skip_special_tokens": body.skip_special_tokens}
    return [(await prompt_tokens(context, model, {"input_ids": ids, **skip}))[0] for ids in lists]


async def detokenize(context: RequestContext) -> dict[str, str]:
    """Serve POST /detokenize: the text of token ids, special tokens included."""
    body: DetokenizeRequest = context.body
    model = await _detokenizer(context, body.model)
    text, _ = await prompt_tokens(context, model, {"input_ids": body.tokens, "skip_special_tokens": False})
    return {"prompt": text}


async def _tokenizer(context: RequestContext, name: str | None) -> ServedModel:
    return await context.model_for("with tokenization", lambda model: TOKENIZE in model.inputs, name)


async def _detokenizer(context: RequestContext, name: str | None) -> ServedModel:
    return await context.model_for(
        "with detokenization", lambda model: {TOKENIZE, "input_ids"} <= set(model.inputs), name
    )


async def _tokenize_texts(context: RequestContext) -> list[list[dict[str, Any]]]:
    body: TeiTokenizeRequest = context.body
    model = await _tokenizer(context, body.model)
    prompt = {} if body.prompt_name is None else {"prompt_name": body.prompt_name}
    lists = await _text_tokens(context, model, as_list(body.inputs), prompt)
    return [[token for token in tokens if body.add_special_tokens or not token["special"]] for tokens in lists]


async def _tokenize_prompt(context: RequestContext) -> dict[str, Any]:
    body: TokenizeRequest = context.body
    if (body.prompt is None) == (body.messages is None):
        raise bad_field("prompt", "send prompt or messages, or inputs as TEI's clients do")
    model = await _tokenizer(context, body.model)
    if body.prompt is not None:
        (tokens,) = await _text_tokens(context, model, [body.prompt], {})
    else:
        tokens = await _chat_tokens(context, model, body)
    if body.add_special_tokens is False:
        tokens = [token for token in tokens if not token["special"]]
    return {
        "count": len(tokens),
        "max_model_len": model.max_total_tokens or model.max_input_length,
        "tokens": [token["id"] for token in tokens],
        "token_strs": [token["text"] for token in tokens] if body.return_token_strs else None,
    }


async def _text_tokens(
    context: RequestContext, model: ServedModel, texts: list[str], options: dict[str, str]
) -> list[list[dict[str, Any]]]:
    model.refuse_unknown_inputs(options)
    if model.is_decoupled:
        return [(await prompt_tokens(context, model, {"text_input": text, **options}))[1] for text in texts]
    rows = await infer_rows(context, model, [{"text_input": [text]} for text in texts], {TOKENIZE: True, **options})
    return [loads(row["tokens"][0]) for row in rows]


async def _chat_tokens(context: RequestContext, model: ServedModel, body: TokenizeRequest) -> list[dict[str, Any]]:
    if "messages" not in model.inputs or not model.has_chat_template:
        raise bad_field("messages", f"{model.name} has no chat template; send prompt")
    body.refuse_prompts()
    inputs: dict[str, Any] = {"messages": as_template(model, body.messages or [])}
    if body.tools:
        inputs["tools"] = dumps(body.tools)
    if body.chat_template_kwargs:
        inputs["chat_template_kwargs"] = dumps(body.chat_template_kwargs)
    if body.continue_final_message:
        inputs["continue_final_message"] = True
    model.refuse_unknown_inputs(inputs)
    return (await prompt_tokens(context, model, inputs))[1]


async def prompt_tokens(
    context: RequestContext, model: ServedModel, inputs: dict[str, Any]
) -> tuple[str, list[dict[str, Any]]]:
    """Return the text and the tokens of one prompt, from a generating model that generates nothing for it."""
    request = make_request(context, model, {**inputs, TOKENIZE: True})
    async with aclosing(context.gateway.triton.stream(request, context.metadata)) as stream:
        answers = [outputs async for outputs in stream]
    if len(answers) != 1:
        raise ApiError(500, f"{model.name} answered {len(answers)} times with its tokens; expected one answer")
    return answers[0]["text_output"].strings()[0], loads(answers[0]["tokens"].strings()[0])
