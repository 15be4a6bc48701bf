"""Models of a models.yaml before they are checked: included files, patterns of folders, matrices of options.

The result is options by name, one mapping per model, each with the place that it comes from. Knows no option but
`model` and `name`; the specification decides which others are valid.
"""

from __future__ import annotations

import difflib
import glob
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from builder.common.errors import SpecError

POD = "pod"
KEYS = ("models", "defaults", "include", POD)
MATRIX = "matrix"
PATTERN = re.compile(r"[*?\[]")  # characters that no Hub id has
Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is ten times faster


@dataclass(frozen=True)
class EntryLocation:
    """Location of a model: the `position`-th of `models` in `file`, from 0 on.

    `alone`: no other model comes from the same entry.
    """

    file: Path
    line: int
    position: int
    alone: bool = True

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class RawEntry:
    """Unchecked options of one model."""

    options: Mapping[str, Any]
    origin: EntryLocation


def read_models_file(
    path: Path, defaults: Mapping[str, Any] | None = None, including: tuple[Path, ...] = ()
) -> Iterator[RawEntry]:
    """Yield every model of `path`, then those of the files that it includes. Raises SpecError.

    `defaults` and `including`: the options and the paths of the files that include this one.
    """
    if path.resolve() in including:
        raise SpecError(f"{path} includes itself, by way of {including[-1]}")
    document, lines = _read(path)
    if including and POD in document:
        raise SpecError(f"{path}: `{POD}` is for all models: it belongs in {including[0]}, which includes this file")
    defaults = {**(defaults or {}), **_mapping(document.get("defaults"), f"{path}: `defaults`")}
    for position, entry in enumerate(document.get("models") or ()):
        yield from _expanded(defaults, entry, EntryLocation(path, lines[position], position))
    for included in _included(path, document.get("include")):
        yield from read_models_file(included, defaults, (*including, path.resolve()))


def read_pod_section(path: Path) -> dict[str, Any]:
    """Return the section `pod` of a models.yaml, unchecked; empty if it has none. Raises SpecError."""
    document, _ = _read(path)
    return _mapping(document.get(POD), f"{path}: `{POD}`")


def _read(path: Path) -> tuple[dict[str, Any], list[int]]:
    """Return the document, and the line of each of its `models`."""
    try:
        loader = Loader(path.read_text("utf-8"))
        node = loader.get_single_node()
        content = None if node is None else loader.construct_document(node)
    except OSError as error:
        raise SpecError(f"{path} cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecError(f"{path} cannot be read as YAML: {error}") from error
    document: dict[str, Any] = content if isinstance(content, dict) else {}
    models = document.get("models", [] if document.get("include") else None)
    if not isinstance(models, list) or not (models or document.get("include")):
        raise SpecError(f"{path}: expected a mapping with a list `models`, one mapping a model, or with `include`")
    unknown = [str(key) for key in document if key not in KEYS]
    if unknown:
        raise SpecError(f"{path}: unknown key {min(unknown)!r}{nearest(min(unknown), KEYS)}")
    listed = [value for key, value in node.value if key.value == "models"]
    return document, [item.start_mark.line + 1 for value in listed[-1:] for item in value.value]


def _included(path: Path, listed: object) -> Iterator[Path]:
    """Yield the files that `path` includes, by paths and patterns from its own folder on."""
    patterns = [listed] if isinstance(listed, str) else listed or ()
    if not isinstance(patterns, Sequence) or not all(isinstance(pattern, str) for pattern in patterns):
        raise SpecError(f"{path}: `include` is a path, or a list of them; found {listed!r}")
    for pattern in patterns:
        paths = sorted(glob.glob(pattern, root_dir=path.parent)) if PATTERN.search(pattern) else [pattern]
        if not paths:
            raise SpecError(f"{path}: include: no file is called {pattern}, from {path.parent.resolve()} on")
        yield from (path.parent / name for name in paths)


def _expanded(defaults: Mapping[str, Any], entry: object, origin: EntryLocation) -> Iterator[RawEntry]:
    """Yield the models of one entry: one, or one for each combination of its matrix and each folder of its pattern."""
    own = _mapping(entry, f"{origin}: each of `models`")
    options = {**defaults, **own}
    matrix = _matrix(options.pop(MATRIX, None), origin)
    if "model" not in {**options, **matrix}:
        raise SpecError(f"{origin}: each of `models` needs a key `model`; found {entry!r}")
    combinations = (dict(zip(matrix, values, strict=True)) for values in itertools.product(*matrix.values()))
    expanded = [one for chosen in combinations for one in _of_folders(options, chosen, origin)]
    alone = not matrix and not _is_pattern(options)
    yield from (RawEntry(one, EntryLocation(origin.file, origin.line, origin.position, alone)) for one in expanded)


def _matrix(value: object, origin: EntryLocation) -> dict[str, list[Any]]:
    matrix = _mapping(value, f"{origin}: `{MATRIX}`")
    for key, values in matrix.items():
        plain = isinstance(values, list) and values and all(isinstance(v, str | int | float) for v in values)
        if not plain or key == "name":
            expected = "names come of the other options" if key == "name" else "expected a list of texts and numbers"
            raise SpecError(f"{origin}: {MATRIX}.{key}: {expected}; found {values!r}")
    return matrix


def _of_folders(
    options: Mapping[str, Any], chosen: Mapping[str, Any], origin: EntryLocation
) -> Iterator[dict[str, Any]]:
    """Yield `options` with the choice from a matrix, once for each folder that `model` stands for."""
    merged = dict(options)
    for key, value in chosen.items():
        merged = _with(merged, key.split("."), value)
    models = [merged["model"]]
    if _is_pattern(merged):
        models = [str(Path(folder)) for folder in sorted(glob.glob(merged["model"])) if Path(folder).is_dir()]
        if not models:
            raise SpecError(f"{origin}: no folder is called {merged['model']}, from {Path.cwd()} on")
    for model in models:
        one = {**merged, "model": model}
        yield _named(one, chosen, origin) if chosen or "{" in str(one.get("name")) else one


def _with(options: Mapping[str, Any], keys: Sequence[str], value: object) -> dict[str, Any]:
    """Return `options` with one set, however deep it is."""
    key, *deeper = keys
    inner = options.get(key)
    return {**options, key: _with(inner if isinstance(inner, dict) else {}, deeper, value) if deeper else value}


def _named(options: dict[str, Any], chosen: Mapping[str, Any], origin: EntryLocation) -> dict[str, Any]:
    """Return `options` with a name of its own: its own name with the placeholders filled, or the choice appended."""
    values = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in chosen.items()}
    values["model"] = Path(str(options["model"])).name
    name = str(options.get("name", "{model}"))
    if "{" not in name or "name" not in options:
        name += "".join(f"-{{{key}}}" for key in chosen if key != "model")
    try:
        return {**options, "name": re.sub(r"\{(.*?)\}", lambda match: values[match[1]], name)}
    except KeyError as error:
        known = ", ".join(f"{{{key}}}" for key in values)
        raise SpecError(f"{origin}: the name {name!r} has {{{error.args[0]}}}; there are {known}") from None


def _is_pattern(options: Mapping[str, Any]) -> bool:
    return isinstance(options.get("model"), str) and PATTERN.search(options["model"]) is not None


def _mapping(value: object, what: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise SpecError(f"{what}: expected a mapping of options; found {value!r}")
    return value


def nearest(key: str, known: Sequence[str]) -> str:
    """Return the end of a sentence that names an unknown key: the nearest known key, or all of them."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
