"""Where an answer's form is asked for: response_format, guided_*, tools. One input of the model takes all of it.

A model that has the input `guide` gets it as JSON; one that has not is asked for free text alone.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from builder.gateway.errors import bad_field
from builder.gateway.models import Model
from builder.gateway.responses import dumps

GUIDE = "guide"
GUIDED = {"guided_json": "json_schema", "guided_regex": "regex", "guided_grammar": "grammar", "guided_choice": "choice"}
GUIDING = frozenset({"response_format", "tools", "tool_choice", *GUIDED})


def guide_inputs(model: Model, body: BaseModel) -> dict[str, Any]:
    """The inputs that say what form an answer has. Raises ApiError for a form that the model cannot keep to."""
    asked = {name: value for name, value in body if name in GUIDING and _means_something(name, value)}
    for name in asked:
        if GUIDE not in model.inputs:
            raise bad_field(name, f"{model.name} was built without guided decoding, which {name} needs")
    return {GUIDE: dumps(asked)} if asked else {}


def _means_something(name: str, value: Any) -> bool:
    """Whether `value` asks for anything but text."""
    if name == "response_format" and isinstance(value, dict):
        return bool(value != {"type": "text"})
    if name == "tool_choice" and value in ("none", "auto"):
        return False
    return value is not None and value != []
