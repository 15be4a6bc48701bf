"""Render config.pbtxt from its template, and parse it back with Triton's own protobuf."""

from __future__ import annotations

import functools
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import jinja2
from google.protobuf import text_encoding, text_format
from tritonclient.grpc import model_config_pb2

from builder.common.distribution import PACKAGE
from builder.common.errors import RepositoryError

if TYPE_CHECKING:
    from builder.repository.config.entries import Config


CONFIG = "config.pbtxt"


def templates() -> Path:
    """Return the folder of the templates: inside an installed package, or at the top of the checkout."""
    inside = PACKAGE / "templates"
    return inside if inside.is_dir() else PACKAGE.parent / "templates"


def render(config: Config) -> str:
    """Return the text of config.pbtxt. Raises RepositoryError if Triton would read other values."""
    try:
        text = _template(templates()).render({field.name: getattr(config, field.name) for field in fields(config)})
    except jinja2.UndefinedError as error:
        raise RepositoryError(f"config.pbtxt.j2 needs a value that is missing: {error}") from error
    parsed = parse(text, config.name)
    names = ([f.name for f in parsed.input], [f.name for f in parsed.output])
    if parsed.name != config.name or names != ([f.name for f in config.inputs], [f.name for f in config.outputs]):
        raise RepositoryError(f"config.pbtxt of {config.name} does not read back as it was meant")
    return text


@functools.cache
def _template(folder: Path) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["pbtxt"] = quote
    return environment.get_template("config.pbtxt.j2")


def parse(text: str, name: str) -> model_config_pb2.ModelConfig:
    """Parse a config.pbtxt. Raises RepositoryError with the line that does not parse."""
    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except (text_format.ParseError, RecursionError) as error:
        raise RepositoryError(f"config.pbtxt of {name} is not a Triton model configuration: {error}") from error


def has_input(config: model_config_pb2.ModelConfig, name: str) -> bool:
    """Return True if a model with this configuration has an input of that name."""
    return any(field.name == name for field in config.input)


def quote(value: object) -> str:
    """Escape a value for a quoted string of the protobuf text format."""
    return str(text_encoding.CEscape(str(value).encode(), as_utf8=True))
