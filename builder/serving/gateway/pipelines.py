"""Convert requests and answers of Hugging Face's pipelines, as huggingface_hub's InferenceClient sends and reads them.

Source: https://github.com/huggingface/huggingface.js, packages/tasks/src/tasks/*/spec
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from pydantic import Field

from builder.serving.gateway.classification import ALL_LABELS
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.rows import TOKENS, as_values
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.validation import StrictBody
from builder.serving.gateway.vectors import resize

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
IN_JSON = {"token-classification": "entities", "fill-mask": "predictions"}  # outputs that are one JSON document


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


def can_run(model: ServedModel, task: str) -> bool:
    """Return True if the model answers this task."""
    return model.task == task or (task in VECTORS and model.task in VECTORS and model.is_embedder)


def model_options(model: ServedModel, parameters: Mapping[str, Any]) -> dict[str, Any]:
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
    values = as_values({name: array for name, array in row.items() if name != TOKENS}, model.outputs)
    if model.task in IN_JSON:
        return json.loads(values[IN_JSON[model.task]])
    if model.task == "question-answering":
        answers = json.loads(values["answers"])
        return answers[0] if options.get("top_k", 1) == 1 else answers
    if model.task in ("text-classification", "zero-shot-classification"):
        return [{"label": label, "score": score} for label, score in zip(values["label"], values["score"], strict=True)]
    return values


def generated_answer(model: ServedModel, text: str, finish_reason: str | None) -> dict[str, Any]:
    """Return an answer of a generating model."""
    return {TEXTS.get(model.task, "generated_text"): text, "finish_reason": finish_reason}


def whole_answer(model: ServedModel, answers: list[Any], single: bool) -> Any:
    """Return the answers of all inputs. Some pipelines answer a single input with a list of one."""
    in_a_list = model.is_decoupled or model.task == "text-classification"
    return answers[0] if single and not in_a_list else answers
