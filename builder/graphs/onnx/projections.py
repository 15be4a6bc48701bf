"""Matrix products for engines: plain MatMul over all axes, and one product where several share an input.

Q, K and V of one hidden state, or the gate and the up projection of one feed-forward, are columns of one wider matrix:
one product reads the input once, and costs one call instead of three. Rewrites that leave every value as it is; nothing
here recognises a model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from builder.graphs.onnx.cleanup import drop_unused, known_shapes
from builder.graphs.onnx.experts import routers_of
from builder.graphs.onnx.nodes import attributes_of
from builder.graphs.onnx.operators import CACHED_ATTENTION
from builder.graphs.onnx.weights import Rows, made_of, rows_of, values_of


@dataclass(frozen=True)
class Projection:
    """Product with a constant matrix, and the constant bias added to it, if there is one."""

    product: onnx.NodeProto
    bias: onnx.NodeProto | None

    @property
    def output(self) -> str:
        return str((self.bias or self.product).output[0])


def merge_projections(model: onnx.ModelProto) -> None:
    """Rewrite in place: Gemm to MatMul and Add, products of one input to one, which GroupQueryAttention takes whole."""
    graph = model.graph
    spell_out_gemms(graph)
    weights = {tensor.name: tensor for tensor in graph.initializer}
    _drop_flattening(graph, weights)
    _merge(graph, weights)
    _rewrite_reciprocals(graph)
    _pack_queries(graph)
    drop_unused(graph)


def spell_out_gemms(graph: onnx.GraphProto) -> None:
    """Replace Gemm by MatMul + Add. One whose matrix is also read elsewhere (a tied embedding) stays, to share it."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    readers = Counter(name for node in graph.node for name in node.input)
    nodes = []
    for node in graph.node:
        attributes = attributes_of(node)
        plain = attributes.get("alpha", 1.0) == 1.0 and attributes.get("beta", 1.0) == 1.0
        if (
            node.op_type != "Gemm"
            or not plain
            or attributes.get("transA")
            or node.input[1] not in weights
            or (attributes.get("transB") and readers[node.input[1]] > 1)
        ):
            nodes.append(node)
            continue
        matrix = node.input[1]
        if attributes.get("transB"):
            source, matrix = weights[matrix], f"{matrix}.transposed"
            _add_weight(graph, weights, made_of(source, matrix, source.dims[::-1], _columns(source)))
        biased = len(node.input) == 3 and node.input[2]
        product = f"{node.output[0]}.product" if biased else node.output[0]
        nodes.append(helper.make_node("MatMul", [node.input[0], matrix], [product], name=f"{node.name}.product"))
        if biased:
            nodes.append(helper.make_node("Add", [product, node.input[2]], [node.output[0]], name=f"{node.name}.bias"))
    del graph.node[:]
    graph.node.extend(nodes)


def _drop_flattening(graph: onnx.GraphProto, weights: dict[str, onnx.TensorProto]) -> None:
    """Replace Reshape of the first two axes of three to one -> product -> Reshape back by one product.

    That product is over three axes.
    """
    producers, readers, shapes = _producers(graph), _readers(graph), known_shapes(graph)
    for projection in _projections(graph, weights, readers):
        before = producers.get(projection.product.input[0])
        after = readers[projection.output]
        if before is None or before.op_type != "Reshape":
            continue
        inputs, outputs = weights[projection.product.input[1]].dims
        *leading, last = shapes.get(before.input[0], (None,))
        whole = (*leading, outputs)
        if len(leading) != 2 or last != inputs or not after:
            continue
        if any(node.op_type != "Reshape" or shapes.get(node.output[0]) != whole for node in after):
            continue
        projection.product.input[0] = before.input[0]
        for node in after:
            for reader in readers[node.output[0]]:
                for index, name in enumerate(reader.input):
                    if name == node.output[0]:
                        reader.input[index] = projection.output


def _merge(graph: onnx.GraphProto, weights: dict[str, onnx.TensorProto]) -> None:
    """Merge products of one input, with matrices that have no other reader, into one product and a Split.

    A router stays alone: in fewer bits the others are rounded, and it is not.
    """
    readers, routers = _readers(graph), routers_of(graph)
    groups: dict[tuple[str, bool], list[Projection]] = defaultdict(list)
    for projection in _projections(graph, weights, readers):
        if len(readers[projection.product.input[1]]) == 1 and projection.product.output[0] not in routers:
            groups[projection.product.input[0], projection.bias is not None].append(projection)
    outputs = {value.name for value in graph.output}
    for (source, biased), group in groups.items():
        if len(group) < 2 or any(projection.output in outputs for projection in group):
            continue
        name = f"{group[0].product.name}.merged"
        matrices = [weights[p.product.input[1]] for p in group]
        sizes = np.array([matrix.dims[1] for matrix in matrices], dtype=np.int64)
        dims = (matrices[0].dims[0], int(sizes.sum()))
        _add_weight(graph, weights, made_of(matrices[0], f"{name}.weight", dims, _side_by_side(matrices)))
        _add_weight(graph, weights, numpy_helper.from_array(sizes, f"{name}.sizes"))
        nodes = [helper.make_node("MatMul", [source, f"{name}.weight"], [f"{name}.product"], name=name)]
        if biased:
            biases = [values_of(weights[_bias(p, weights)]) for p in group]
            _add_weight(graph, weights, numpy_helper.from_array(np.concatenate(biases), f"{name}.bias"))
            nodes.append(helper.make_node("Add", [f"{name}.product", f"{name}.bias"], [f"{name}.sum"]))
        split = [nodes[-1].output[0], f"{name}.sizes"]
        nodes.append(helper.make_node("Split", split, [p.output for p in group], name=f"{name}.split", axis=-1))
        replaced = {node.output[0] for p in group for node in (p.product, p.bias) if node is not None}
        first = next(i for i, node in enumerate(graph.node) if node.output[0] in replaced)
        rest = [*graph.node[:first], *nodes, *graph.node[first:]]
        del graph.node[:]
        graph.node.extend(node for node in rest if node.name == f"{name}.split" or node.output[0] not in replaced)


def _rewrite_reciprocals(graph: onnx.GraphProto) -> None:
    """Rewrite x * (1 / sqrt(v)) to x / sqrt(v), which ONNX Runtime recognises as a root-mean-square normalisation."""
    producers = _producers(graph)
    for node in graph.node:
        if node.op_type != "Mul":
            continue
        for operand in (0, 1):
            inverse = producers.get(node.input[operand])
            root = producers.get(inverse.input[0]) if inverse is not None and inverse.op_type == "Reciprocal" else None
            if inverse is not None and root is not None and root.op_type == "Sqrt":
                divided = helper.make_node(
                    "Div", [node.input[1 - operand], inverse.input[0]], node.output, name=node.name
                )
                node.CopyFrom(divided)
                break


def _pack_queries(graph: onnx.GraphProto) -> None:
    """Rewrite GroupQueryAttention(Split(x)) to GroupQueryAttention(x).

    Here x holds queries, keys and values in this order.
    """
    producers = _producers(graph)
    for node in graph.node:
        if node.op_type != CACHED_ATTENTION:
            continue
        split = producers.get(node.input[0])
        if split is not None and split.op_type == "Split" and list(split.output) == list(node.input[:3]):
            node.input[0], node.input[1], node.input[2] = split.input[0], "", ""


def _projections(
    graph: onnx.GraphProto, weights: dict[str, onnx.TensorProto], readers: dict[str, list[onnx.NodeProto]]
) -> list[Projection]:
    projections = []
    for node in graph.node:
        if node.op_type != "MatMul" or node.input[1] not in weights or len(weights[node.input[1]].dims) != 2:
            continue
        (reader,) = readers[node.output[0]] if len(readers[node.output[0]]) == 1 else (None,)
        projection = Projection(node, reader)
        biased = reader is not None and reader.op_type == "Add" and _bias(projection, weights) in weights
        projections.append(projection if biased else Projection(node, None))
    return projections


def _bias(projection: Projection, weights: dict[str, onnx.TensorProto]) -> str:
    """Return the one-dimensional constant that is added; empty if the addend is not one."""
    assert projection.bias is not None
    size = weights[projection.product.input[1]].dims[1]
    others = [name for name in projection.bias.input if name in weights and list(weights[name].dims) == [size]]
    return others[0] if others else ""


def _producers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    return {output: node for node in graph.node for output in node.output}


def _readers(graph: onnx.GraphProto) -> dict[str, list[onnx.NodeProto]]:
    readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in graph.node:
        for name in node.input:
            readers[name].append(node)
    return readers


def _columns(matrix: onnx.TensorProto) -> Rows:
    """Return a reader of the rows of its transpose."""
    values = values_of(matrix)
    return lambda columns: values[:, columns].T


def _side_by_side(matrices: Sequence[onnx.TensorProto]) -> Rows:
    """Return a reader of the rows of a matrix of all their columns."""
    parts = [rows_of(matrix) for matrix in matrices]
    return lambda rows: np.concatenate([part(rows) for part in parts], axis=1)


def _add_weight(graph: onnx.GraphProto, weights: dict[str, onnx.TensorProto], tensor: onnx.TensorProto) -> None:
    graph.initializer.append(tensor)
    weights[tensor.name] = graph.initializer[-1]
