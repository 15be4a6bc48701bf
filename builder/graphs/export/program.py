"""torch.export to an ONNX model that every supported release reads. Knows modules and tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import onnx
import onnx_ir
import torch

from builder.checkpoints.mapped import give_back
from builder.common.errors import ExportError
from builder.common.replaced import replaced
from builder.graphs.export.decompositions import decompose
from builder.graphs.export.exporter_shortcuts import exporter_shortcuts
from builder.graphs.export.failure import reason
from builder.graphs.export.norms import recognisable_norms
from builder.graphs.onnx.cleanup import clean
from builder.graphs.onnx.graph import Graph, has_many, save_graph
from builder.graphs.onnx.weights import MIN_FILE_BYTES, computed, computing

OPSET = 20  # the newest that every supported release reads
IR_VERSION = 9

Translated = TypeVar("Translated")


def export_graph(
    path: Path,
    module: torch.nn.Module,
    tensors: Sequence[torch.Tensor],
    dynamic_axes: Sequence[Mapping[int, Any]],
    inputs: Sequence[str],
    outputs: Sequence[str],
    rewrite: Callable[[onnx.ModelProto], None] = lambda model: None,
) -> Graph:
    """Export `module` as `to_onnx` does, rewrite it in place, write it to `path`. Raises ExportError."""
    with computing():
        model = to_onnx(module, tensors, dynamic_axes, inputs, outputs)
        rewrite(model)
        return save_graph(model, path)


def to_onnx(
    module: torch.nn.Module,
    tensors: Sequence[torch.Tensor],
    dynamic_axes: Sequence[Mapping[int, Any]],
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> onnx.ModelProto:
    """Export `module`, whose forward takes `tensors` by position; `dynamic_axes` has one mapping per tensor.

    Many weights stay the module's own, read when the graph is written (builder/graphs/onnx/weights.py): within
    `computing`.
    Raises ExportError with the operation that failed.
    """
    module.eval()

    def translated() -> torch.onnx.ONNXProgram | None:
        return torch.onnx.export(
            module,
            tuple(tensors),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=(tuple(dynamic_axes),),
            input_names=list(inputs),
            output_names=list(outputs),
            verbose=False,
        )

    try:
        with torch.no_grad(), exporter_shortcuts(), _children_kept(module), recognisable_norms(module):
            program = _decomposed_where_needed(translated)
    except Exception as error:  # whatever the module's own code raises
        raise ExportError(reason(error)) from error
    if program is None:
        raise ExportError("torch.onnx.export made no program")
    model = _proto(program)
    give_back(module)
    axes = dict(zip(inputs, dynamic_axes, strict=True))
    _refuse_fixed_axes(model.graph, axes)
    _refuse_joined_axes(model.graph, axes)
    clean(model)
    model.ir_version = IR_VERSION
    return model


@contextmanager
def _children_kept(module: torch.nn.Module) -> Iterator[None]:
    """Restore the children of all modules at the end.

    torch.export undoes the assignments of a forward to a module, except for its children: BigBird, which changes its
    attention with its first short text, kept half of the change.
    """
    before = [(one, dict(one._modules)) for one in module.modules()]
    try:
        yield
    finally:
        for one, children in before:
            one._modules.clear()
            one._modules.update(children)


def _proto(program: torch.onnx.ONNXProgram) -> onnx.ModelProto:
    constants = {name: value.const_value for name, value in program.model.graph.initializers.items()}
    large = {name: one for name, one in constants.items() if one is not None and one.nbytes >= MIN_FILE_BYTES}
    if has_many(sum(one.nbytes for one in large.values())):
        for name, tensor in large.items():  # their protos have no values, which are read where the tensors have them
            values = tensor.numpy()
            described = computed(name, tensor.dtype.value, values.shape, values.__getitem__)
            program.model.graph.initializers[name].const_value = onnx_ir.serde.deserialize_tensor(described)
    model: onnx.ModelProto = program.model_proto
    return model


def _refuse_fixed_axes(graph: onnx.GraphProto, axes: Mapping[str, Mapping[int, Any]]) -> None:
    """Raise ExportError for an axis of an input, or a first axis of an output, that kept the example's size.

    torch.onnx falls back on shapes of the example where the model's code turns a size into a number.
    """
    dynamic = [(value, axis) for value in graph.input for axis in axes[value.name]]
    dynamic += [(value, 0) for value in graph.output]
    sizes = [(value.name, axis, value.type.tensor_type.shape.dim[axis]) for value, axis in dynamic]
    fixed = [f"axis {axis} of {name} ({size.dim_value})" for name, axis, size in sizes if size.HasField("dim_value")]
    if fixed:
        raise ExportError(
            f"its code turns sizes of its input into numbers, so that the graph is for those alone: {', '.join(fixed)}"
        )


def _refuse_joined_axes(graph: onnx.GraphProto, axes: Mapping[str, Mapping[int, Any]]) -> None:
    """Raise ExportError if independent axes of the inputs have one name in the graph."""
    meant: dict[str, set[str]] = {}
    for value in graph.input:
        for axis, dimension in axes[value.name].items():
            meant.setdefault(value.type.tensor_type.shape.dim[axis].dim_param, set()).add(dimension.__name__)
    joined = [" and ".join(sorted(names)) for names in meant.values() if len(names) > 1]
    if joined:
        raise ExportError(
            f"its code takes {joined[0]} for one size, so that the graph is for calls where they are equal"
        )


def _decomposed_where_needed(translated: Callable[[], Translated]) -> Translated:
    """Translate the program without torch.onnx.export's second trace, unless it is needed.

    That trace breaks up operators that ONNX does not know, and takes half of the time. Operators of transformers'
    models that need it are nearly always replaced without a trace (builder/graphs/export/decompositions.py).

    Torch's table lacks operators that may return their input as it is: if the export fails on one, it is
    repeated with that trace.
    """
    undecomposed: list[torch.export.ExportedProgram] = []
    with _only_needed_decompositions(undecomposed):
        try:
            return translated()
        except Exception:
            if not undecomposed:
                raise
    return translated()


@contextmanager
def _only_needed_decompositions(undecomposed: list[torch.export.ExportedProgram]) -> Iterator[None]:
    """Run with decomposition only of programs with a node that it would change; the others go into `undecomposed`."""
    original = torch.export.ExportedProgram.run_decompositions

    def where_needed(
        program: torch.export.ExportedProgram, table: Mapping[Any, Any] | None = None, **more: Any
    ) -> torch.export.ExportedProgram:
        decompose(program.graph)
        if table is None or not _is_decomposed(program, table):
            return original(program, table, **more)
        undecomposed.append(program)
        return program

    with replaced((torch.export.ExportedProgram, "run_decompositions", where_needed)):
        yield


def _is_decomposed(program: torch.export.ExportedProgram, table: Mapping[Any, Any]) -> bool:
    """Return True if no node is in `table` and none writes into its input."""
    called = [node.target for node in program.graph.nodes if node.op == "call_function"]
    schemas = (getattr(target, "_schema", None) for target in called)
    return not any(target in table for target in called) and not any(s is not None and s.is_mutable for s in schemas)
