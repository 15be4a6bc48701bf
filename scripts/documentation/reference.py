"""The configuration and command-line reference, from the specification and from the parsers."""

from __future__ import annotations

import argparse
import importlib
import json
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from builder.commands import VERBS
from builder.options import BuildSpec, PodOptions
from scripts.documentation.markdown import table

HEADS = ("key", "values", "meaning")


def configuration() -> str:
    """Return every key of a models.yaml entry: those of a build, then a section for each group of keys."""
    options = [item for item in BuildSpec.model_fields.items() if not _groups(item[1].annotation)]
    groups = [item for item in BuildSpec.model_fields.items() if _groups(item[1].annotation)]
    parts = ["## Options of a build", table(HEADS, (_row(*item) for item in options))]
    for name, field in groups:
        parts += _sections(name, _groups(field.annotation)[0])
    return "\n\n".join(parts)


def pod() -> str:
    """Return every key of the section `pod` of a models.yaml."""
    return "\n\n".join(_sections("pod", PodOptions))


def _sections(path: str, model: type[BaseModel]) -> list[str]:
    """Return the section of `model`, then those of the models inside it."""
    parts = [f"## `{path}`", _text(model.__doc__), table(HEADS, (_row(*item) for item in model.model_fields.items()))]
    for name, field in model.model_fields.items():
        for inner in _groups(field.annotation):
            parts += _sections(f"{path}.{name}", inner)
    return parts


def _groups(annotation: Any) -> list[type[BaseModel]]:
    """Return the models in an annotation: itself, or the members of a tuple."""
    parts = typing.get_args(annotation) or (annotation,)
    return [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]


def _row(name: str, field: FieldInfo) -> tuple[str, ...]:
    extra = field.json_schema_extra
    flag = isinstance(extra, dict) and bool(extra.get("flag"))
    key = f"`{name}`" + (f"<br>`--{name.replace('_', '-')}`" if flag else "")
    return key, f"{_values(field)}{_default(field)}", _text(field.description)


def _values(field: FieldInfo) -> str:
    limits = {type(limit).__name__.lower(): limit for limit in field.metadata}
    bounds = [f"{sign} {getattr(limits[name], name)}" for name, sign in BOUNDS if name in limits]
    return ", ".join([_type(field.annotation), *bounds])


BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
NAMES = {str: "text", Path: "path", int: "integer", float: "number", bool: "true or false"}


def _type(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f"`{part}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(part) for part in parts if part is not type(None))
    if origin is typing.Annotated:
        return _type(parts[0])
    if origin is tuple:
        if Ellipsis in parts:
            return "list of groups of keys" if _groups(parts[0]) else f"list of {_type(parts[0])}s"
        return f"[{', '.join(_type(part) for part in parts)}]"
    if _groups(annotation):
        return "a group of keys"
    return NAMES.get(annotation, "mapping")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "<br>required"
    value = field.default
    if value in (None, (), {}) or isinstance(value, BaseModel):
        return ""
    return f"<br>default `{json.dumps(value, default=str)}`"


def _text(documented: str | None) -> str:
    return " ".join((documented or "").split())


def commands() -> str:
    """Return the options of every verb; those of a build are keys of the configuration too."""
    parts = []
    for verb in VERBS:
        parser: argparse.ArgumentParser = importlib.import_module(f"builder.commands.{verb.replace('-', '_')}").parser()
        rows = [(f"`{_invocation(action)}`", _meaning(action)) for action in parser._actions if action.dest != "help"]
        parts += [f"## build-repo {verb}", parser.description or "", table(("argument", "meaning"), rows)]
    return "\n\n".join(parts)


def _invocation(action: argparse.Action) -> str:
    value = action.metavar or action.dest.upper()
    if not action.option_strings:
        return f"{value if action.metavar else action.dest}"
    return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")


def _meaning(action: argparse.Action) -> str:
    """Return the help of an option as argparse shows it, and its choices."""
    text = (action.help or "").replace("%%", "%")
    choices = ", ".join(f"`{choice}`" for choice in action.choices or ())
    return f"{text} ({choices})" if choices else text
