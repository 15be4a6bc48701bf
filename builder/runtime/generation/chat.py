"""A chat as one prompt: the checkpoint's own template, rendered in a sandbox as transformers renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from ..fields import InputError


class ChatTemplate:
    """Renders messages. `source` comes from the checkpoint and is not trusted: it can reach no Python object."""

    def __init__(self, source: str, tokens: "Mapping[str, str]") -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        self.template = environment.from_string(source)
        self.tokens = dict(tokens)

    def __call__(self, messages: "Sequence[Mapping[str, Any]]") -> str:
        """The prompt, ending where the assistant's answer begins. Raises InputError for what the template refuses."""
        try:
            return self.template.render(messages=messages, add_generation_prompt=True, **self.tokens)
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, OverflowError) as error:
            raise InputError(f"the model's chat template refuses these messages: {error}") from error


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: "int | None" = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
