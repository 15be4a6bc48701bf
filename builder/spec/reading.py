"""Read specifications: from options by name, or from a models.yaml. Errors name the key and what was expected."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from builder.errors import SpecError
from builder.spec.build_spec import BuildSpec


def make_spec(**options: Any) -> BuildSpec:
    """The BuildSpec with these options, named as keys of a models.yaml.

    Raises SpecError, which says what is wrong with which option.
    """
    try:
        return BuildSpec(**options)
    except ValidationError as error:
        raise SpecError(_explain(error, options.get("model"))) from None


def load_specs(path: Path) -> list[BuildSpec]:
    """Read a models.yaml: a mapping with a list `models`, and perhaps `defaults` for all of them.

    Raises SpecError where the file cannot be read, or a key or value of it means nothing.
    """
    try:
        document = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("models"), list) or not document["models"]:
        raise SpecError(f"{path}: expected a mapping with a list `models`, one mapping a model")
    unknown = set(document) - {"models", "defaults"}
    if unknown:
        raise SpecError(f"{path}: unknown key {min(unknown)!r}{_nearest(min(unknown), ['models', 'defaults'])}")
    specs = []
    for entry in document["models"]:
        if not isinstance(entry, dict) or "model" not in entry:
            raise SpecError(f"{path}: each of `models` needs a key `model`; found {entry!r}")
        specs.append(make_spec(**{**(document.get("defaults") or {}), **entry}))
    names = [spec.entry_name for spec in specs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise SpecError(f"{path}: the name {min(twice)!r} is used twice; give each model its own `name`")
    return specs


def _explain(error: ValidationError, model: str | None) -> str:
    lines = []
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            owner: type[BaseModel] = BuildSpec
            for part in problem["loc"][:-1]:
                annotation = owner.model_fields[str(part)].annotation if str(part) in owner.model_fields else None
                owner = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else owner
            lines.append(f"unknown key {path!r}{_nearest(str(problem['loc'][-1]), list(owner.model_fields))}")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{path}: {message}, found {problem['input']!r}" if path else message)
    return (f"{model}: " if model else "") + "; ".join(lines)


def _nearest(key: str, known: list[str]) -> str:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
