"""Read specifications: from options by name, or from a models.yaml. Errors name the key and what was expected."""

from __future__ import annotations

import re
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from builder.common.addresses import is_registry
from builder.common.errors import SpecError
from builder.options.build_spec import BuildSpec
from builder.options.models_file import POD, EntryLocation, nearest, read_models_file, read_pod_section
from builder.options.pod import PodOptions

SHOWN = 5  # errors of a models.yaml
VERSION = re.compile(r":\d+$")  # of the address of a model in a registry


@dataclass(frozen=True)
class Entry:
    """One model of a models.yaml, and its location."""

    spec: BuildSpec
    origin: EntryLocation


def make_spec(**options: Any) -> BuildSpec:
    """Return the BuildSpec with these options, named as keys of a models.yaml.

    Raises SpecError, which names the option and its problem.
    """
    try:
        return BuildSpec(**options)
    except ValidationError as error:
        raise SpecError(_explain(error, options.get("model"), BuildSpec)) from None


def load_specs(path: Path) -> list[BuildSpec]:
    """Read a models.yaml: a list `models`, one mapping per model, `defaults` for all of them, files to `include`.

    An entry with a `matrix` of options is one model for each combination, and one whose `model` is a pattern is one for
    each folder. Raises SpecError if a file cannot be read, or a key or value in it is invalid; it names the file,
    the line and the model.
    """
    return [entry.spec for entry in load_entries(path)]


def load_entries(path: Path) -> list[Entry]:
    """Read a models.yaml as `load_specs` does, with the location of each model. Raises SpecError."""
    entries, errors = [], []
    for raw in read_models_file(path):
        try:
            entries.append(Entry(make_spec(**raw.options), raw.origin))
        except SpecError as error:
            errors.append(f"{raw.origin}: {error}")
    if errors:
        more = f"\nand {len(errors) - SHOWN} more" * (len(errors) > SHOWN)
        raise SpecError("\n".join(errors[:SHOWN]) + more)
    _refuse_equal_names(entries)
    _refuse_equal_registries(entries)
    return entries


def load_pod_options(path: Path) -> PodOptions:
    """Read the section `pod` of a models.yaml; the defaults if it has none. Raises SpecError."""
    section = read_pod_section(path)
    try:
        return PodOptions(**section)
    except ValidationError as error:
        raise SpecError(_explain(error, f"{path}: {POD}", PodOptions)) from None


def _refuse_equal_names(entries: Sequence[Entry]) -> None:
    known: dict[str, EntryLocation] = {}
    for entry in entries:
        name = entry.spec.entry_name
        if name in known:
            raise SpecError(
                f"{entry.origin}: the name {name!r} is used twice, first at {known[name]}; give each model its own "
                "`name` ({model} in it is the last part of MODEL)"
            )
        known[name] = entry.origin


def _refuse_equal_registries(entries: Sequence[Entry]) -> None:
    repositories = [VERSION.sub("", entry.spec.store or "") for entry in entries]
    counts = Counter(filter(is_registry, repositories))
    for entry, repository in zip(entries, repositories, strict=True):
        if counts[repository] > 1:
            raise SpecError(
                f"{entry.origin}: {repository} is the output of two models, and a repository of a registry is of one: "
                "give each model its own `output`"
            )


def _explain(error: ValidationError, subject: str | None, read: type[BaseModel]) -> str:
    lines = []
    for problem in error.errors():
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            owner = _owner(problem["loc"][:-1], read)
            lines.append(f"unknown key {path!r}{nearest(str(problem['loc'][-1]), list(owner.model_fields))}")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{path}: {message}, found {problem['input']!r}" if path else message)
    return (f"{subject}: " if subject else "") + "; ".join(lines)


def _owner(location: Sequence[int | str], owner: type[BaseModel]) -> type[BaseModel]:
    """Return the part of `owner` at `location`, through optional parts and lists of parts."""
    for part in location:
        if part in owner.model_fields:
            owner = next(_parts(owner.model_fields[str(part)].annotation), owner)
    return owner


def _parts(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in an annotation: itself, or those of an optional value or of a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _parts(inner)
