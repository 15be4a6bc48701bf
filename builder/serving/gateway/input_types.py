"""Turn the kind of text that clients name into the input of a model: a role, or the name of a prompt.

`input_type` is Cohere's, Voyage's and NVIDIA NIM's field, `task` Jina's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.served_model import ServedModel

InputType = Literal[
    "query", "document", "passage", "search_query", "search_document", "retrieval.query", "retrieval.passage",
    "classification", "clustering", "separation", "text-matching",
]  # fmt: skip
QUERY = ("query", "search_query", "retrieval.query")
DOCUMENT = ("document", "passage", "search_document", "retrieval.passage")
SAME: Mapping[str, tuple[str, ...]] = {name: names for names in (QUERY, DOCUMENT) for name in names}


def input_type_options(model: ServedModel, input_type: str | None) -> dict[str, Any]:
    """Return the inputs by which `model` reads a text of this type; none if it reads all texts alike."""
    if input_type is None:
        return {}
    if "input_type" in model.inputs and input_type in SAME:
        return {"input_type": "query" if input_type in QUERY else "document"}
    names = (input_type, *SAME.get(input_type, ()))
    found = next((name for name in names if name in model.prompts), None)
    return {} if found is None else {"prompt_name": found}


def text_options(model: ServedModel, prompt_name: str | None, input_type: str | None) -> dict[str, Any]:
    """Return the inputs for a prompt by its name or an input type. Raises ApiError for both."""
    if prompt_name is None:
        return input_type_options(model, input_type)
    if input_type is not None:
        raise bad_field("input_type", "prompt_name and input_type both say what a text is for; send one of them")
    return prompt_options(model, prompt_name)


def prompt_options(model: ServedModel, prompt_name: str | None) -> dict[str, Any]:
    """Return the inputs for a prompt by its name, which is a role for a model with roles instead of prompts."""
    if prompt_name in SAME and "prompt_name" not in model.inputs:
        return input_type_options(model, prompt_name) or {"prompt_name": prompt_name}
    return {} if prompt_name is None else {"prompt_name": prompt_name}
