"""Classify texts for all classification routes, with scores or raw logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.rows import infer_rows
from builder.serving.gateway.served_model import ServedModel

ALL_LABELS = 2**31 - 1
FUNCTION = "function_to_apply"  # input that selects the function applied to the logits


def is_classifier(model: ServedModel) -> bool:
    """Return True for a classifier of texts or pairs."""
    return model.task == "text-classification"


async def label_scores(
    context: RequestContext, model: ServedModel, inputs: Sequence[str | list[str]], options: Mapping[str, Any]
) -> list[list[tuple[str, float]]]:
    """Return every label of each text or pair with its score, best first. Raises ApiError."""
    rows = [_row(number, value) for number, value in enumerate(inputs)]
    answers = await infer_rows(context, model, rows, {"top_k": ALL_LABELS, **options})
    return [
        [(str(label), float(score)) for label, score in zip(answer["label"], answer["score"], strict=True)]
        for answer in answers
    ]


def raw_scores(model: ServedModel, name: str) -> dict[str, str]:
    """Return the option that requests logits. Raises ApiError for the field `name` if the model lacks it."""
    if FUNCTION not in model.inputs:
        raise bad_field(
            name, f"{model.name} answers its scores after sigmoid or softmax alone; build it again, or leave {name} out"
        )
    return {FUNCTION: "none"}


def _row(number: int, value: str | list[str]) -> dict[str, list[str]]:
    texts = [value] if isinstance(value, str) else value
    if not 1 <= len(texts) <= 2:
        raise bad_field("inputs", f"inputs[{number}] has {len(texts)} texts; send one, or a pair")
    return dict(zip(("text_input", "text_pair"), ([text] for text in texts), strict=False))
