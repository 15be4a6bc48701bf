"""Serve POST /v1/tasks/TASK and /models/NAME: any task with its own inputs, in the shape of Hugging Face's pipelines.

{"model": "names", "inputs": "text" | {input: value} | [either, ...], "parameters": {option: value}}
Source: https://github.com/huggingface/huggingface.js, packages/tasks/src/tasks/*/spec
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import aclosing
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.encoders import ALL_LABELS, TOKENS, Sentences, infer_rows, resize, similarities
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.generation.generate import MAX_PROMPTS, Completion, TokenUsage, generate_all
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.validation import ExtensibleBody, StrictBody, validate_body

UNSUPPORTED_INPUTS = ("stream", "n", "logprobs")  # a single answer of text has no place for these
VECTORS = ("feature-extraction", "sentence-similarity")  # one model serves both
RENAMED: Mapping[str, str] = {  # transformers' and TGI's name -> the model's input
    "src_lang": "source_language",
    "tgt_lang": "target_language",
    "max_new_tokens": "max_tokens",
    "stop": "stop_words",
    "seed": "random_seed",
}
HARMLESS = {"return_full_text": False, "details": False, "decoder_input_details": False, "watermark": False}
TEXTS = {"translation": "translation_text", "summarization": "summary_text"}
IN_JSON = {
    "token-classification": "entities",
    "entity-extraction": "entities",
    "fill-mask": "predictions",
}  # outputs that are one JSON document
DOCUMENTS = ("entities", "classifications", "relations", "structures")  # outputs of information-extraction, in JSON
SCHEMA = "schema"  # its input that is a JSON document


class TaskRequest(ExtensibleBody):
    """Parameters may also be next to `inputs`, where feature-extraction's clients send them."""

    model: str | None = None
    inputs: str | dict[str, Any] | Annotated[list[str | dict[str, Any]], Field(min_length=1, max_length=4096)]
    parameters: dict[str, Any] = Field({})


async def run(context: RequestContext) -> Any:
    """Serve POST /v1/tasks/TASK: the answers of a model for the task in the path."""
    body: TaskRequest = context.body
    task = context.path["task"]
    model = await context.model_for(f"for {task}", lambda model: _can_run(model, task), body.model)
    return await _answer(context, model, body)


async def run_model(context: RequestContext) -> Any:
    """Serve POST /models/NAME: the answers of the model in the path, whatever its task."""
    body: TaskRequest = context.body
    if body.model not in (None, context.path["name"]):
        raise bad_field("model", f"model is {body.model!r} and the path says {context.path['name']!r}; leave model out")
    return await _answer(context, await context.model(context.path["name"]), body)


async def _answer(context: RequestContext, model: ServedModel, body: TaskRequest) -> Any:
    options = _with_text(_model_options(model, {**(body.model_extra or {}), **body.parameters}))
    if model.is_embedder and isinstance(body.inputs, dict) and "sentences" in body.inputs:
        _refuse_unknown(model, options)
        return await similarities(context, model, validate_body(Sentences, body.inputs), **options)
    has_vectors = "embedding" in model.outputs and not model.outputs.keys() & {"indices", "vectors"}
    vector_options = {name: options.pop(name) for name in VectorOptions.model_fields if has_vectors and name in options}
    _refuse_unknown(model, options)
    inputs = body.inputs if isinstance(body.inputs, list) else [body.inputs]
    rows = [_with_text(_row(model, number, entry, options)) for number, entry in enumerate(inputs)]
    if model.is_decoupled:
        return await _generated(context, model, [{**options, **row} for row in rows])
    rows = [{name: v if isinstance(v, list) else [v] for name, v in row.items()} for row in rows]
    if has_vectors:
        post = validate_body(VectorOptions, vector_options)
        # vectors of tokens: texts of unequal length have no common shape
        requests = [rows] if model.is_embedder else [[row] for row in rows]
        answered = [row for part in requests for row in await infer_rows(context, model, part, options)]
        answers: list[Any] = post.apply(model, [row["embedding"] for row in answered])
    else:
        answered = await infer_rows(context, model, rows, options)
        answers = [pipeline_answer(model, row, options) for row in answered]
    # a text classifier answers a single input with a list of one too
    return answers if isinstance(body.inputs, list) or model.task == "text-classification" else answers[0]


async def _generated(context: RequestContext, model: ServedModel, requests: list[dict[str, Any]]) -> list[Any]:
    """Return the generated texts, in a list even if there is one."""
    if len(requests) > MAX_PROMPTS:
        raise bad_field("inputs", f"inputs holds {len(requests)} texts; send at most {MAX_PROMPTS}")
    choices, usage = [Completion() for _ in requests], TokenUsage()
    async with aclosing(generate_all(context, model, requests)) as pieces:
        async for number, piece in pieces:
            choices[number].add(piece)
            usage.add(piece, number)
    context.record.prompt_tokens = usage.prompt
    name = TEXTS.get(model.task, "generated_text")
    return [{name: choice.text, "finish_reason": choice.finish_reason} for choice in choices]


def _row(model: ServedModel, number: int, value: str | dict[str, Any], given: Collection[str]) -> dict[str, Any]:
    required = [f.name for f in model.inputs.values() if not (f.optional or f.name in given)]
    if isinstance(value, str):
        required = required or ["text_input"]
        if len(required) > 1:
            names = ", ".join(required)
            raise bad_field("inputs", f"inputs[{number}] is text; {model.name} needs {names}: send an object")
        return {required[0]: value}
    missing = [name for name in required if name not in value]
    if missing:
        raise bad_field("inputs", f"inputs[{number}] has no {missing[0]}, which {model.name} needs")
    _refuse_unknown(model, value)
    return value


def _with_text(values: dict[str, Any]) -> dict[str, Any]:
    """Return a request's inputs with the schema, if it is an object, as the text that models read."""
    schema = values.get(SCHEMA)
    return {**values, SCHEMA: json.dumps(schema, ensure_ascii=False)} if isinstance(schema, dict) else values


def _refuse_unknown(model: ServedModel, names: Collection[str]) -> None:
    for name in names:
        if name not in model.inputs or (model.is_decoupled and name in UNSUPPORTED_INPUTS):
            raise bad_field(name, f"{model.name} does not support {name}; its inputs are {', '.join(model.inputs)}")


class VectorOptions(StrictBody):
    """Parameters of vectors that the gateway applies itself."""

    normalize: bool = False
    dimensions: int | None = Field(None, ge=1)
    truncation_direction: Literal["Left", "left", "Right", "right"] | None = None
    encoding_format: Literal["float"] = "float"

    def apply(self, model: ServedModel, vectors: list[np.ndarray]) -> list[np.ndarray]:
        """Return the vectors, shortened and scaled to length 1 on request. Raises ApiError."""
        if self.truncation_direction is not None:
            model.refuse_truncation_side("truncation_direction", self.truncation_direction.lower())
        if not model.is_embedder:
            for name in ("normalize", "dimensions"):
                if getattr(self, name):
                    raise bad_field(name, f"vectors of tokens are returned unchanged; leave {name} out")
        return resize(vectors, self.dimensions, normalized=self.normalize)


def _can_run(model: ServedModel, task: str) -> bool:
    """Return True if the model answers this task."""
    return model.task == task or (task in VECTORS and model.task in VECTORS and model.is_embedder)


def _model_options(model: ServedModel, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pipeline's parameters as inputs of the model; names that the model lacks remain. Raises ApiError."""
    nested = parameters.get("generate_parameters") or {}
    if not isinstance(nested, dict):
        raise bad_field("generate_parameters", "generate_parameters is not an object of parameters")
    options = {}
    for name, value in {**parameters, "generate_parameters": None, **nested}.items():
        target = RENAMED.get(name, name)
        if value is not None and not (name in HARMLESS and value == HARMLESS[name]):
            options[target if target in model.inputs else name] = value
    if model.task == "text-classification":
        options.setdefault("top_k", ALL_LABELS)
    return options


def pipeline_answer(model: ServedModel, row: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Return a row of outputs in the shape of the task's pipeline."""
    if "vectors" in row:
        count = int(row["vector_count"][0])
        row = {**row, "vectors": row["vectors"][:count], "offsets": row["offsets"][:count]}
    if "indices" in row:
        row = {**row, **{name: row[name][row["indices"] >= 0] for name in ("indices", "values")}}
    values = {  # a tensor declared with exactly one value becomes that value
        name: array.tolist()[0] if tuple(model.outputs[name].dims) == (1,) else array.tolist()
        for name, array in row.items()
        if name != TOKENS
    }
    if model.task in IN_JSON:
        return json.loads(values[IN_JSON[model.task]])
    if model.task == "information-extraction":
        return {**values, **{name: json.loads(values[name]) for name in DOCUMENTS}}
    if model.task == "question-answering":
        answers = json.loads(values["answers"])
        return answers[0] if options.get("top_k", 1) == 1 else answers
    if model.task in ("text-classification", "zero-shot-classification"):
        return [{"label": label, "score": score} for label, score in zip(values["label"], values["score"], strict=True)]
    return values
