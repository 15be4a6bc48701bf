"""An exported model on disk: its files, its signature and its operators.

Knows ONNX files; knows nothing about how they were made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path

import onnx

from builder.common.errors import ExportError
from builder.common.releases import OPERATOR_NEEDS, OPSET_LIMITS, RELEASES, runtime_of, version_tuple
from builder.graphs.onnx.nodes import attributes_of
from builder.graphs.onnx.operators import (
    ATTENTION,
    ATTENTION_BIAS,
    BIAS_FOR_ALL_HEADS_NEED,
    CACHED_ATTENTION,
    CACHED_BIAS,
    CACHED_PAST,
    CACHED_SINKS,
    DOMAIN,
    EXPERTS,
    EXPERTS_NEED,
    FOR_ALL_HEADS,
    QUANTISED_EXPERTS,
    QUANTISED_EXPERTS_NEED,
    SHARED_CACHE_NEED,
    STANDARD,
)
from builder.graphs.onnx.weights import beside, point_to, size_of, take_in
from builder.runtime.generation.executors.paged import OPERATOR as PAGED_ATTENTION
from builder.runtime.lora import LORA_ROWS, STACKS
from builder.runtime.sessions import version_mismatch

MODEL_FILE = "model.onnx"
ENCODER_FILE = "encoder.onnx"  # of an encoder-decoder model, whose decoder is MODEL_FILE


@dataclass(frozen=True)
class Graph:
    """One model file with its signature.

    `operators` counts nodes by operator type that one call runs at most: of an If, the branch that has more of a type.
    `engine` is the Triton backend it is for, `arithmetic` the type of its real products: fp32, bf16, or fp16 on a
    GPU. `beside`: files of weights that other graphs read too.
    """

    path: Path
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    output_dims: tuple[tuple[int, ...], ...]  # batch excluded, -1 for any size
    opset: int
    ir_version: int
    operators: Counter[str]
    size: int  # bytes, weights included
    engine: str = "onnxruntime"
    arithmetic: str = "fp32"
    beside: tuple[Path, ...] = ()

    @property
    def token_inputs(self) -> tuple[str, ...]:
        """Inputs without those of adapters, which the executor adds to an encoder's."""
        return tuple(name for name in self.inputs if not name.startswith((LORA_ROWS, *STACKS)))

    @property
    def files(self) -> tuple[Path, ...]:
        """Model file, and the files of its weights where those are others."""
        return tuple(sorted((*self.path.parent.glob(f"{self.path.stem}.*"), *self.beside)))


# Bytes of weights from which they have a file of their own, which is mapped: protobuf holds what it reads or writes
# several times over, writes them anew with each change of the graph, and ends at 2 GiB.
EXTERNAL_FROM = 10_000_000


def has_many(weights: int) -> bool:
    """Return True if so many bytes of weights have a file of their own."""
    return weights >= EXTERNAL_FROM


def load_graph(path: Path, weights: Path | None = None) -> onnx.ModelProto:
    """Read `path` to rewrite it; many weights stay in their file (builder/graphs/onnx/weights.py).

    That file is in the folder `weights`, or beside `path`.
    """
    model = onnx.load(str(path), load_external_data=False)
    point_to(model, weights or path.parent)
    if not has_many(_weights(model)):
        take_in(model.graph)
    return model


def load_whole(path: Path) -> onnx.ModelProto:
    """Read `path` with all values in its tensors.

    onnx's own reader refuses a file of weights that has several names, as one that the cache shares does.
    """
    model = load_graph(path)
    take_in(model.graph)
    return model


def _weights(model: onnx.ModelProto) -> int:
    return sum(map(size_of, model.graph.initializer))


def save_graph(model: onnx.ModelProto, path: Path) -> Graph:
    """Write `model`, the same bytes for the same model.

    Many weights go to a file beside it, unless they are there already.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    described = [value for value in model.graph.value_info if value.name in weights]
    for value in described:  # redundant, and wrong as soon as a tool transposes the weight
        model.graph.value_info.remove(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = path.with_name(f"{path.name}.data")
    if has_many(_weights(model)):
        model = beside(model, data)
    else:
        take_in(model.graph)
        data.unlink(missing_ok=True)
    path.write_bytes(model.SerializeToString(deterministic=True))
    return _described(model, path)


def remove_graph(graph: Graph) -> None:
    """Remove the files of `graph`, except those that others read too."""
    for file in set(graph.files) - set(graph.beside):
        file.unlink(missing_ok=True)


def read_graph(path: Path) -> Graph:
    """Read the signature and operators of an ONNX file."""
    return _described(onnx.load(str(path), load_external_data=False), path)


def _described(model: onnx.ModelProto, path: Path) -> Graph:
    """Return the description of the file `path`, which holds `model`."""
    return Graph(
        path=path,
        inputs=tuple(value.name for value in model.graph.input),
        outputs=tuple(value.name for value in model.graph.output),
        output_dims=tuple(
            tuple(d.dim_value or -1 for d in value.type.tensor_type.shape.dim)[1:] for value in model.graph.output
        ),
        opset=next((entry.version for entry in model.opset_import if entry.domain in STANDARD), 0),
        ir_version=model.ir_version,
        operators=_operators(model.graph),
        size=sum(file.stat().st_size for file in path.parent.glob(f"{path.stem}.*")),
        arithmetic="bf16" if any(t.data_type == onnx.TensorProto.BFLOAT16 for t in model.graph.initializer) else "fp32",
    )


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes, those of branches too."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from nodes_of(attribute.g)


def _operators(graph: onnx.GraphProto) -> Counter[str]:
    operators = Counter(node.op_type for node in graph.node)
    for node in graph.node:
        branches = [_operators(attribute.g) for attribute in node.attribute if attribute.HasField("g")]
        operators += reduce(or_, branches, Counter[str]())
    return operators


def operator_needs(graph: Graph) -> list[str]:
    """Return the OPERATOR_NEEDS that a graph uses, the newest first."""
    return _operator_needs(onnx.load(str(graph.path), load_external_data=False))


def _operator_needs(model: onnx.ModelProto) -> list[str]:
    needs = {need for node in nodes_of(model.graph) for need in _needs(node)}
    shapes = {value.name: value.type.tensor_type.shape.dim for value in model.graph.input}
    tokens = shapes.get("input_ids", ())
    if any(map(_has_past, nodes_of(model.graph))) and len(tokens) > 1 and tokens[1].dim_value != 1:
        needs.add("GroupQueryAttention with several new tokens after a past")
    return sorted(needs, key=lambda need: version_tuple(OPERATOR_NEEDS[need]), reverse=True)


def _has_past(node: onnx.NodeProto) -> bool:
    return node.op_type == CACHED_ATTENTION and len(node.input) > CACHED_PAST and node.input[CACHED_PAST] != ""


def _needs(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the OPERATOR_NEEDS that one node uses."""
    attributes = attributes_of(node)
    if node.op_type == "MatMulNBits" and attributes.get("bits") == 8:
        yield "MatMulNBits with 8 bits"
    if node.op_type == "CausalConvWithState":
        yield "CausalConvWithState with the channels last"
    if node.op_type == "LinearAttention":
        yield "LinearAttention on CPU"
    if node.op_type == PAGED_ATTENTION and node.domain == DOMAIN:
        yield "PagedAttention with bounds on lengths"
    if node.op_type == EXPERTS:
        yield EXPERTS_NEED
    if node.op_type == QUANTISED_EXPERTS:
        yield QUANTISED_EXPERTS_NEED
    if has_bias_for_all_heads(node):
        yield BIAS_FOR_ALL_HEADS_NEED
    if node.op_type != CACHED_ATTENTION:
        return
    yield "GroupQueryAttention on CPU"
    if attributes.get("softcap"):
        yield "GroupQueryAttention with softcap"
    if attributes.get("kv_cache_bit_width"):
        yield "GroupQueryAttention with an int8 cache"
    if _has_past(node) and len(node.output) == 1:
        yield SHARED_CACHE_NEED
    if len(node.input) > CACHED_BIAS and node.input[CACHED_BIAS]:
        yield "GroupQueryAttention with attention_bias"
    if len(node.input) > CACHED_SINKS and node.input[CACHED_SINKS]:
        yield "GroupQueryAttention with head_sink"


def has_bias_for_all_heads(node: onnx.NodeProto) -> bool:
    """Return True for attention with a bias that has one head, which the heads share."""
    return node.op_type == ATTENTION and any(name.endswith(FOR_ALL_HEADS) for name in node.input[ATTENTION_BIAS:][:1])


def check_release(graph: Graph, triton: str, in_process: bool = False) -> None:
    """Raise ExportError for a graph that the ONNX Runtime which will run it cannot read, or reads otherwise.

    `in_process`: in Triton's interpreter, by what the emitted requirements pin; else in the release's own backend.
    """
    has = runtime_of(triton, in_process)
    model = onnx.load(str(graph.path), load_external_data=False)
    where = f"the Python {RELEASES[triton].python} of Triton {triton}" if in_process else f"Triton {triton}"
    for need in _operator_needs(model):
        least = version_tuple(OPERATOR_NEEDS[need])
        if least > version_tuple(has):
            able = [name for name in RELEASES if version_tuple(runtime_of(name, in_process)) >= least]
            raise ExportError(
                f"{graph.path.name} uses {need}, which ONNX Runtime computes rightly from {OPERATOR_NEEDS[need]} on; "
                f"{where} has {has}. " + (f"Build for Triton {able[0]} or later" if able else "No known release has it")
            )
    problem = version_mismatch({entry.key: entry.value for entry in model.metadata_props}, has)
    if problem is not None:  # it was written for versions that give it another meaning
        raise ExportError(f"{graph.path.name}: {problem}; {where} has it. Build it with --triton for that release")
    opset, ir_version = OPSET_LIMITS[has]
    if graph.opset <= opset and graph.ir_version <= ir_version:
        return
    newer = [n for n, r in RELEASES.items() if graph.opset <= r.opset and graph.ir_version <= r.ir_version]
    raise ExportError(
        f"{graph.path.name} needs opset {graph.opset} and IR version {graph.ir_version}; {where} (ONNX Runtime "
        f"{has}) reads up to {opset} and {ir_version}. "
        + (f"Build for Triton {newer[0]} or later" if newer else "No known release reads it")
    )
