"""Read the user's own graph, check its tensors against the task's, and name them so.

The graph exported from the checkpoint is the contract of the front. Its answers are verified later, as any variant's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, MutableSequence, Sequence
from functools import lru_cache
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import GraphProto, TensorProto, ValueInfoProto

from builder.building.graph_folders import graph_file
from builder.common.errors import SpecError
from builder.common.hashing import digest_of
from builder.graphs.onnx.graph import Graph, load_whole, nodes_of, save_graph

AITUNE = ("input_", "output_")  # prefixes of AITune's names for what a module takes and gives


def graph_files(path: Path) -> list[Path]:
    """Return the file of `--graph` and those of its weights. Raises SpecError."""
    file = graph_file(path)
    stat = file.stat()
    locations = _locations(file, (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    for location in locations:
        inside = not Path(location).is_absolute() and ".." not in Path(location).parts
        if not inside or not (file.parent / location).is_file():
            raise SpecError(
                f"--graph {file} cannot be read as ONNX: its weights are in {location}, which is "
                + ("not there: copy it beside the graph" if inside else "outside its folder: save them beside it")
            )
    return [file, *(file.parent / location for location in locations)]


def graph_digests(path: Path) -> dict[str, str]:
    """Return the SHA-256 of the file of `--graph`, then of those of its weights, by name.

    Raises SpecError and OSError.
    """
    files = graph_files(path)
    return {str(file.relative_to(files[0].parent)): digest_of([file]) for file in files}


@lru_cache
def _locations(file: Path, state: tuple[int, ...]) -> tuple[str, ...]:
    """Return the names of the files of weights; several keys need them, of which each would read the whole graph.

    `state`: size, times and inode of `file`, so that a changed one is read again. Raises SpecError.
    """
    try:
        graph = onnx.load(str(file), load_external_data=False).graph
    except (OSError, DecodeError, ValueError) as error:
        raise SpecError(f"--graph {file} cannot be read as ONNX: {error}") from error
    return tuple(sorted(set(_external(graph))))


def _external(graph: GraphProto) -> Iterator[str]:
    """Yield the name of the file of each tensor of `graph` that is in one."""
    attributes = [attribute for node in nodes_of(graph) for attribute in node.attribute]
    tensors = [
        *graph.initializer,
        *(t for a in attributes for t in (a.t, *a.tensors)),
        *(t for a in attributes for t in a.g.initializer),
    ]
    for tensor in tensors:
        if tensor.data_location == TensorProto.EXTERNAL:
            yield from (entry.value for entry in tensor.external_data if entry.key == "location")


def own_graph(path: Path, exported: Graph, target: Path) -> Graph:
    """Write the graph of `--graph` to `target`, its tensors named as those of `exported`.

    Raises SpecError if it does not take and give what the task does.
    """
    files = graph_files(path)
    try:
        # onnx's reader knows the weights of other exporters, but refuses a file with several names (hard links), as a
        # published version has: the cache has it too.
        several = any(file.stat().st_nlink > 1 for file in files)
        model = load_whole(files[0]) if several else onnx.load(str(files[0]))
    except (OSError, KeyError, ValueError, onnx.checker.ValidationError) as error:
        raise SpecError(f"--graph {files[0]} cannot be read as ONNX: {error}") from error
    task = onnx.load(str(exported.path), load_external_data=False).graph
    _conform(model.graph, task, files[0])
    return save_graph(model, target)


def _conform(graph: GraphProto, task: GraphProto, file: Path) -> None:
    """Name the inputs and outputs of `graph` as those of `task`, and order its outputs so, in place.

    Inputs that it leaves out are declared, for the front sends them; the verification says if they matter. Raises
    SpecError if names, dtypes or shapes do not fit.
    """
    weights = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in weights]  # IR 3 lists weights among the inputs
    known, results = {value.name: value for value in task.input}, {value.name: value for value in task.output}
    names = {value.name: _plain(value.name, known) for value in inputs}
    names |= {value.name: _plain(value.name, results) for value in graph.output}
    if len(results) == len(graph.output) == 1:
        names[graph.output[0].name] = task.output[0].name
    outputs = [names[value.name] for value in graph.output]
    taken = [names[value.name] for value in inputs]
    if not set(taken) <= set(known) or len(set(taken)) < len(taken) or sorted(outputs) != sorted(results):
        raise SpecError(
            f"--graph {file} takes {', '.join(v.name for v in inputs)} and gives "
            f"{', '.join(v.name for v in graph.output)}; the task takes {', '.join(known)} and gives "
            f"{', '.join(results)}: name them so"
        )
    problems = [_problem(value, known[names[value.name]], is_input=True) for value in inputs]
    problems += [_problem(value, results[names[value.name]], is_input=False) for value in graph.output]
    for problem in filter(None, problems):
        raise SpecError(f"--graph {file} {problem}")
    ordered = sorted(graph.output, key=lambda value: list(results).index(names[value.name]))
    _replace(graph.output, ordered)
    _replace(graph.input, inputs)
    _rename(graph, {old: new for old, new in names.items() if old != new}, known)
    graph.input.extend(value for name, value in known.items() if name not in taken)


def _replace(values: MutableSequence[ValueInfoProto], by: Sequence[ValueInfoProto]) -> None:
    """Replace the inputs or outputs of a graph by some of them."""
    copies = [ValueInfoProto.FromString(value.SerializeToString()) for value in by]
    del values[:]
    values.extend(copies)


def _plain(name: str, known: Mapping[str, ValueInfoProto]) -> str:
    """Return `name`, without AITune's prefix where only that is a name of the task."""
    plain = next((name.removeprefix(prefix) for prefix in AITUNE if name.startswith(prefix)), name)
    return plain if name not in known and plain in known else name


def _problem(value: ValueInfoProto, contract: ValueInfoProto, is_input: bool) -> str | None:
    """Return how a tensor differs from that of the `contract`; None if it does not. An absent shape is not compared."""
    is_type, must_be = value.type.tensor_type, contract.type.tensor_type
    verb = "takes" if is_input else "gives"
    if is_type.elem_type != must_be.elem_type:
        found, expected = (TensorProto.DataType.Name(kind.elem_type) for kind in (is_type, must_be))
        return f"{verb} {value.name} in {found}; the front expects {expected}: cast it inside the graph"
    if not is_type.HasField("shape"):
        return None
    dims, shape = list(is_type.shape.dim), _shape(is_type.shape.dim)
    if len(dims) != len(must_be.shape.dim):
        expected = _shape(must_be.shape.dim)
        return f"{verb} {value.name} of shape {shape}; the task has {contract.name} of shape {expected}"
    for dim, other in zip(dims, must_be.shape.dim, strict=True):
        if is_input and dim.dim_value and not other.dim_value:
            return f"takes {value.name} of the fixed shape {shape}; rows and tokens vary: export it with dynamic axes"
        if dim.dim_value and other.dim_value and dim.dim_value != other.dim_value:
            expected = _shape(must_be.shape.dim)
            return f"{verb} {value.name} of shape {shape}; the checkpoint has {contract.name} of shape {expected}"
    return None


def _shape(dims: Sequence[onnx.TensorShapeProto.Dimension]) -> str:
    return f"[{', '.join(dim.dim_param or str(dim.dim_value or '?') for dim in dims)}]"


def _rename(graph: GraphProto, names: Mapping[str, str], known: Collection[str]) -> None:
    """Rename values in place, in branches too; others that have a new name, or a `known` input's, get another."""
    given = {value.name for value in graph.input}
    every = {name for node in nodes_of(graph) for name in (*node.input, *node.output)}
    every |= {tensor.name for tensor in graph.initializer}
    reserved = {*names.values(), *known} - {*names, *given}
    inner = {name: f"{name}.inner" for name in reserved & every}
    renamed = {**inner, **names}
    for node in nodes_of(graph):
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    branches = [attribute.g for node in nodes_of(graph) for attribute in node.attribute if attribute.HasField("g")]
    for part in (graph, *branches):
        for value in (*part.input, *part.output, *part.value_info, *part.initializer):
            value.name = renamed.get(value.name, value.name)
