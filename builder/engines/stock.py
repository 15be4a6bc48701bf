"""Models that Triton's own C++ backends refuse, release by release, so that nothing else accepts them first.

The Python-based backends that stand in for them ask here when they load a model; `check` asks when it reads one.
The rules are in the backend.toml of each engine's folder. A line of it is a fact of `Backend`, or one rule with its
source: a repository of github.com/triton-inference-server, its file and function. Fields that a backend does not read
have no effect there, and are not refused. Knows configurations, signatures and build.json; opens no graph.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builder.common.releases import version_tuple

OLDEST = "24.04"
NEWEST = "99.12"  # for a repository without a release: the rules of the newest backends
Config = Mapping[str, Any]  # protobuf's JSON, or the one that Triton hands to a Python-based backend


@dataclass(frozen=True)
class Parameter:
    """Parameter that a backend reads.

    `values`: a pattern of all that it accepts, in lower case; None: anything. `since`: the first release that reads it.
    `kind`: kind of the instances for which it is read; None: all.
    """

    name: str
    backend: str
    values: str | None
    since: str
    kind: str | None
    source: str


@dataclass(frozen=True)
class Tensor:
    """One input or output of a graph. `data_type`: as in config.pbtxt; `shape`: batch included, -1 for any size."""

    data_type: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Signature:
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]


@dataclass(frozen=True)
class Backend:
    """One of Triton's C++ backends. `accelerators`: by name, its execution accelerators of GPU instances."""

    parameters: tuple[Parameter, ...]
    accelerators: Mapping[str, Mapping[str, Any]]
    runs_on_gpus: bool = True
    takes_fewer_rows: bool = True  # False: the rows of a call are max_batch_size, no fewer
    compares_types: bool = False  # False: it converts types
    compares_outputs_exactly: bool = False
    batches_optional_inputs: bool = True
    batches_ragged_inputs: bool = False


def _backend(file: Path) -> Backend:
    table = tomllib.loads(file.read_text("utf-8"))
    rules = tuple(
        Parameter(name, file.parent.name, row.get("values"), row.get("since", OLDEST), row.get("kind"), row["source"])
        for row in table.pop("parameter", ())
        for name in row["names"]
    )
    accelerators = {row["name"]: row for row in table.pop("accelerator", ())}
    return Backend(rules, accelerators, **table)


STOCK_BACKENDS = {file.parent.name: _backend(file) for file in sorted(Path(__file__).parent.glob("*/backend.toml"))}
_UNKNOWN = Backend((), {})


def refusals(config: Config, release: str | None) -> Iterator[str]:
    """Yield why the backend of `release` does not load a model of this configuration, whatever its graph."""
    read = {rule.name: rule for rule in _read(config, release)}
    for name, value in parameters(config).items():
        rule = read.get(name)
        if rule is not None and rule.values is not None and not re.fullmatch(rule.values, value.lower()):
            takes = rule.values.upper().replace("|", ", ")
            for number in (r"[+-]?\D.*", r"\D+"):  # the patterns of numbers, in upper case
                takes = takes.replace(number, "a number")
            yield f"the parameter {name} is {value!r}; Triton's {config['backend']} backend takes {takes}"
    backend = _backend_of(config)
    if not backend.runs_on_gpus and "KIND_GPU" in _kinds(config):
        yield f"Triton's {config['backend']} backend has instances of KIND_CPU only"
    for accelerator in accelerators(config):
        yield from _refused_accelerator(accelerator, release)
    for entry in () if backend.batches_optional_inputs else config.get("input", ()):
        if entry.get("optional") and (max_batch_size(config) or entry.get("allow_ragged_batch")):
            yield (
                f"the input {entry.get('name')} is optional; Triton's {config['backend']} backend has such inputs in "
                "models of max_batch_size 0 only, and none that are ragged"
            )


def without_effect(config: Config, release: str | None) -> list[str]:
    """Return the parameters that the backend of `release` does not read."""
    read = {rule.name for rule in _read(config, release)}
    return [name for name in parameters(config) if name not in read]


def mismatches(config: Config, graph: Signature) -> Iterator[str]:
    """Yield where a configuration differs from the graph, as the backends compare the two when they load a model.

    ValidateInputs, ValidateOutputs and CompareDimsSupported of onnxruntime_backend, src/onnxruntime.cc and
    onnxruntime_utils.cc, and of openvino_backend, src/openvino.cc and openvino_utils.cc.
    """
    backend, declared = _backend_of(config), _expected_inputs(config)
    if declared != len(graph.inputs):
        yield f"config.pbtxt declares {declared} inputs, the graph has {_names(graph.inputs)}"
    for kind, tensors in (("input", graph.inputs), ("output", graph.outputs)):
        for entry in config.get(kind, ()):
            tensor = tensors.get(entry["name"])
            if tensor is None:
                yield f"config.pbtxt declares the {kind} {entry['name']}, the graph has {_names(tensors)}"
                continue
            if backend.compares_types and entry["data_type"] != tensor.data_type:
                yield f"config.pbtxt declares {entry['name']} as {entry['data_type']}, the graph has {tensor.data_type}"
            if entry.get("allow_ragged_batch") and backend.batches_ragged_inputs:
                if tensor.shape != (-1,):
                    yield f"config.pbtxt declares {entry['name']} as ragged, the graph has {list(tensor.shape)}"
                continue
            dims = tuple(int(size) for size in entry.get("reshape", {}).get("shape", entry["dims"]))
            if max_batch_size(config):
                dims = (-1, *dims)
            if not _same(dims, tensor.shape, exact=kind == "output" and backend.compares_outputs_exactly):
                yield f"config.pbtxt declares {entry['name']} as {list(dims)}, the graph has {list(tensor.shape)}"


def refuse(config: Config, graph: Signature, model: Path) -> None:
    """Raise RuntimeError for the first reason why the backend of the model's release would not load it."""
    for reason in (*refusals(config, release_of(model)), *mismatches(config, graph)):
        raise RuntimeError(f"unable to load model '{config['name']}': {reason}")


def model_file(config: Config, folder: Path, version: str, default: str) -> Path:
    """Return the path of the model's file in `folder`. Raises RuntimeError if it is not there."""
    path = folder / version / (config.get("default_model_filename") or default)
    if not path.is_file():
        raise RuntimeError(f"unable to find '{path}' for model '{config['name']}'")
    return path


def release_of(model: Path) -> str | None:
    """Return the Triton release that NAME/N/`model` was built for, by its build.json; None if it has none."""
    for report in (model.with_name("build.json"), model.parent.with_name("build.json")):
        if report.is_file():
            release: str | None = json.loads(report.read_text("utf-8")).get("triton")
            return release
    return None


def wrong_batch(config: Config, rows: int) -> str | None:
    """Return why the backend does not run a call of so many rows; None if it does.

    openvino_backend, src/openvino.cc: ValidateConfigureModel sets the batch to max_batch_size, ProcessRequests refuses
    every other number of rows.
    """
    fixed = max_batch_size(config)
    if _backend_of(config).takes_fewer_rows or fixed in (0, rows):
        return None
    return f"expected requests with batch size '{fixed}', got '{rows}': it needs max_batch_size: 0"


def max_batch_size(config: Config) -> int:
    return int(config.get("max_batch_size", 0))


def _backend_of(config: Config) -> Backend:
    return STOCK_BACKENDS.get(config["backend"], _UNKNOWN)


def _read(config: Config, release: str | None) -> list[Parameter]:
    """Return the parameters that the model's backend reads."""
    kinds, now = _kinds(config), version_tuple(release or NEWEST)
    return [
        rule
        for rule in _backend_of(config).parameters
        if version_tuple(rule.since) <= now and (rule.kind is None or rule.kind in kinds)
    ]


def parameters(config: Config) -> dict[str, str]:
    """Return the `parameters` of config.pbtxt."""
    return {name: str(entry.get("string_value", "")) for name, entry in config.get("parameters", {}).items()}


def accelerators(config: Config) -> Sequence[Mapping[str, Any]]:
    """Return the execution accelerators of GPU instances, each with `name` and `parameters`."""
    declared = config.get("optimization", {}).get("execution_accelerators", {})
    return declared.get("gpu_execution_accelerator", ())  # type: ignore[no-any-return]


def _kinds(config: Config) -> set[str]:
    return {group.get("kind", "KIND_AUTO") for group in config.get("instance_group", ())}


def _refused_accelerator(accelerator: Mapping[str, Any], release: str | None) -> Iterator[str]:
    """Yield why no backend takes an accelerator: one backend alone has any, and the core hands it to the model's."""
    name = accelerator.get("name", "")
    owner = next(backend for backend, rules in STOCK_BACKENDS.items() if rules.accelerators)
    rule = STOCK_BACKENDS[owner].accelerators.get(name)
    if rule is None or version_tuple(rule.get("since", OLDEST)) > version_tuple(release or NEWEST):
        yield f"the execution accelerator {name} is unknown to Triton's {owner} backend of {release}"
        return
    for parameter in accelerator.get("parameters", {}):
        if parameter not in rule.get("parameters", (parameter,)):
            yield f"the execution accelerator {name} has no parameter {parameter} in Triton's {owner} backend"


def _expected_inputs(config: Config) -> int:
    """Return how many inputs a graph must have: with those of the batcher and of sequences, without optional ones."""
    sequence = config.get("sequence_batching", {})
    controls = [control for tensor in sequence.get("control_input", ()) for control in tensor.get("control", ())]
    required = [entry for entry in config.get("input", ()) if not entry.get("optional")]
    return sum(map(len, (required, config.get("batch_input", ()), controls, sequence.get("state", ()))))


def _same(dims: Sequence[int], shape: Sequence[int], exact: bool) -> bool:
    """Return True if a declared shape is the graph's; unless `exact`, any size may stand for the graph's -1."""
    if not shape:  # a scalar
        return all(size == 1 for size in dims)
    return len(dims) == len(shape) and all(d == s or (s == -1 and not exact) for d, s in zip(dims, shape, strict=True))


def _names(tensors: Mapping[str, Tensor]) -> str:
    return f"{len(tensors)} ({', '.join(tensors)})"
