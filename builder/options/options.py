"""Base of every part of a specification: options with a default, a limit and a sentence of help."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """A part of the specification: frozen, without unknown keys; the docstring of a field is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
