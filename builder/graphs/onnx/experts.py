"""Mixtures of experts in a graph: the operator's order of their weights, and the form in which all experts run.

Operator: com.microsoft MoE, as in ONNX Runtime's ContribOperators.md and contrib_ops/cpu/moe/moe_cpu.cc. Its inputs are
hidden states (tokens, hidden), router logits (tokens, experts), the weights into the experts (experts, units, hidden)
and out of them (experts, hidden, units), each with a bias; of SwiGLU, gates and linear units take turns. Knows graphs.

ONNX Runtime 1.31.1 writes the operator's result over its hidden states, before it has read them, where no later node
reads those: a wrong answer. So a Where, whose condition is always true, reads them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from builder.graphs.onnx.cleanup import drop_unused
from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.nodes import add_constant, attributes_of, constant_products, replace_nodes
from builder.graphs.onnx.operators import EXPERTS
from builder.graphs.onnx.weights import computed, computing, made_of, rows_of, values_of

# Attributes that an exported node has until its weights are in the operator's order.
STORED, TRANSPOSED = "stored", "transposed"
ALWAYS = "experts.always"  # the condition
INTO, INTO_BIAS, OUT_OF, OUT_OF_BIAS = 2, 3, 4, 5  # places among the inputs

Tensors = dict[str, onnx.TensorProto]
Values = Callable[[], np.ndarray]


def order_experts(model: onnx.ModelProto) -> None:
    """Give the weights of each exported MoE the operator's order, and keep its input until it has run, in place."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        nodes.append(node)
        if node.op_type != EXPERTS:
            continue
        nodes.append(helper.make_node("Where", [ALWAYS, f"{node.output[0]}.alone", node.input[0]], list(node.output)))
        node.output[0] = f"{node.output[0]}.alone"
        attributes = attributes_of(node)
        transposed, taking_turns = attributes[TRANSPOSED], attributes[STORED] == b"side by side"
        for attribute in list(node.attribute):
            if attribute.name in (STORED, TRANSPOSED):
                node.attribute.remove(attribute)
        for place in (INTO, INTO_BIAS, OUT_OF):
            if not _given(node, place):
                continue
            source = tensors[node.input[place]]
            dims, turned = list(source.dims), transposed and place != INTO_BIAS
            if turned:
                dims[1:] = dims[:0:-1]
            mixed = taking_turns and place != OUT_OF
            if turned or mixed:
                name = f"{source.name}.ordered"
                node.input[place] = name
                model.graph.initializer.append(made_of(source, name, dims, _ordered(source, turned, mixed)))
    if len(nodes) > len(model.graph.node):
        add_constant(model.graph, ALWAYS, np.array(True))
        replace_nodes(model.graph, nodes)
    drop_unused(model.graph)


def routers_of(graph: onnx.GraphProto) -> set[str]:
    """Return the outputs of the constant products that the router logits of all experts in `graph` come from.

    A Gemm is not seen as one: spell_out_gemms (projections.py) comes first.
    """
    makers = {output: node for node in graph.node for output in node.output}
    products = {node.output[0] for node in constant_products(graph)}
    pending = [node.input[1] for node in graph.node if node.op_type == EXPERTS]
    found: set[str] = set()
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in products:
            found.add(name)
        elif name in makers and name not in seen:
            pending.extend(makers[name].input)
        seen.add(name)
    return found


def _ordered(source: onnx.TensorProto, turned: bool, mixed: bool) -> Callable[[slice], np.ndarray]:
    """Return a reader of experts: `turned` to (outputs, inputs), the halves of `mixed` outputs taking turns."""
    rows = rows_of(source)

    def read(experts: slice) -> np.ndarray:
        values = rows(experts)
        values = values.swapaxes(1, 2) if turned else values
        if mixed:
            gates, linear = np.split(values, 2, axis=1)
            values = np.stack([gates, linear], axis=2).reshape(values.shape)
        return values

    return read


def run_all_experts(graph: Graph, folder: Path) -> Graph:
    """Write `graph` into `folder` with all experts of each MoE run for every token; return it as it is without one.

    Two products a layer: what engines without the operator run.
    """
    if not graph.operators[EXPERTS]:
        return graph
    with computing():
        model = load_graph(graph.path)
        tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        latest = _Latest()
        nodes: list[onnx.NodeProto] = []
        for node in model.graph.node:
            nodes.extend(_all_experts(model.graph, node, tensors, latest) if node.op_type == EXPERTS else [node])
        replace_nodes(model.graph, nodes)
        drop_unused(model.graph)
        return save_graph(model, folder / "all-experts" / graph.path.name)


class _Latest:
    """Cache of the last matrix, whose rows are read in pieces: one matrix after the other."""

    def __init__(self) -> None:
        self.name, self.values = "", np.zeros(0)

    def rows(self, name: str, make: Values) -> Callable[[slice], np.ndarray]:
        def read(rows: slice) -> np.ndarray:
            if self.name != name:
                self.name, self.values = name, make()
            return self.values[rows]

        return read


def _all_experts(
    graph: onnx.GraphProto, node: onnx.NodeProto, tensors: Tensors, latest: _Latest
) -> Iterator[onnx.NodeProto]:
    """Yield nodes over (tokens, experts * units), gates beside linear units, for one MoE."""
    attributes, of, output = attributes_of(node), f"{node.output[0]}.", node.output[0]
    into, out_of = (tensors[node.input[place]] for place in (INTO, OUT_OF))
    experts, hidden, units = out_of.dims
    gated = attributes["activation_type"] == b"swiglu"
    make = helper.make_node

    def add(name: str, source: onnx.TensorProto, dims: list[int], values: Values) -> str:
        graph.initializer.append(computed(f"{of}{name}", source.data_type, dims, latest.rows(f"{of}{name}", values)))
        return f"{of}{name}"

    columns = add("into", into, [hidden, experts * units * (1 + gated)], lambda: _columns(values_of(into), gated))
    yield make("MatMul", [node.input[0], columns], [f"{of}products"])
    before = f"{of}products"
    if _given(node, INTO_BIAS):
        add_constant(graph, f"{of}bias", _columns(values_of(tensors[node.input[INTO_BIAS]])[..., None], gated)[0])
        before = f"{of}biased"
        yield make("Add", [f"{of}products", f"{of}bias"], [before])
    yield from _gate(graph, of, before, attributes) if gated else _activate(of, before, attributes)
    yield make("Softmax", [node.input[1]], [f"{of}weights"], axis=-1)
    add_constant(graph, f"{of}last", np.array([-1], np.int64))
    add_constant(graph, f"{of}apart", np.array([0, experts, units], np.int64))
    add_constant(graph, f"{of}flat", np.array([0, experts * units], np.int64))
    yield make("Unsqueeze", [f"{of}weights", f"{of}last"], [f"{of}each"])
    yield make("Reshape", [f"{of}activated", f"{of}apart"], [f"{of}experts"])
    yield make("Mul", [f"{of}experts", f"{of}each"], [f"{of}weighted"])
    yield make("Reshape", [f"{of}weighted", f"{of}flat"], [f"{of}together"])
    rows = add("out", out_of, [experts * units, hidden], lambda: _rows(values_of(out_of)))
    biased = _given(node, OUT_OF_BIAS)
    yield make("MatMul", [f"{of}together", rows], [f"{of}sum" if biased else output])
    if biased:
        yield make("MatMul", [f"{of}weights", node.input[OUT_OF_BIAS]], [f"{of}biases"])
        yield make("Add", [f"{of}sum", f"{of}biases"], [output])


def _gate(graph: onnx.GraphProto, of: str, source: str, attributes: dict[str, Any]) -> Iterator[onnx.NodeProto]:
    """Yield nodes for SwiGLU of gates beside linear units."""
    alpha, beta = attributes.get("activation_alpha", 1.0), attributes.get("activation_beta", 0.0)
    make, gate, linear = helper.make_node, f"{of}gate", f"{of}linear"
    yield make("Split", [source], [gate, linear], axis=-1, num_outputs=2)
    if "swiglu_limit" in attributes:
        for name, value in (("high", attributes["swiglu_limit"]), ("low", -attributes["swiglu_limit"])):
            add_constant(graph, f"{of}{name}", np.array(value, np.float32))
        yield make("Min", [gate, f"{of}high"], [f"{of}gate.limited"])
        yield make("Clip", [linear, f"{of}low", f"{of}high"], [f"{of}linear.limited"])
        gate, linear = f"{of}gate.limited", f"{of}linear.limited"
    scaled = gate
    if alpha != 1.0:
        add_constant(graph, f"{of}alpha", np.array(alpha, np.float32))
        scaled = f"{of}scaled"
        yield make("Mul", [gate, f"{of}alpha"], [scaled])
    yield make("Sigmoid", [scaled], [f"{of}sigmoid"])
    yield make("Mul", [gate, f"{of}sigmoid"], [f"{of}swish"])
    if beta != 0.0:
        add_constant(graph, f"{of}beta", np.array(beta, np.float32))
        yield make("Add", [linear, f"{of}beta"], [f"{of}shifted"])
        linear = f"{of}shifted"
    yield make("Mul", [f"{of}swish", linear], [f"{of}activated"])


def _activate(of: str, source: str, attributes: dict[str, Any]) -> Iterator[onnx.NodeProto]:
    """Yield nodes for an activation without a gate."""
    make, output = helper.make_node, f"{of}activated"
    match attributes["activation_type"]:
        case b"silu":
            yield make("Sigmoid", [source], [f"{of}sigmoid"])
            yield make("Mul", [source, f"{of}sigmoid"], [output])
        case b"gelu":
            yield make("Gelu", [source], [output], approximate="tanh")
        case name:
            yield make({b"relu": "Relu", b"identity": "Identity"}[name], [source], [output])


def _columns(values: np.ndarray, gated: bool) -> np.ndarray:
    """Return weights (experts, outputs, inputs) as (inputs, experts * outputs), gates before linear units."""
    parts = [values[:, 0::2], values[:, 1::2]] if gated else [values]
    return np.concatenate([part.reshape(-1, values.shape[2]) for part in parts]).T


def _rows(values: np.ndarray) -> np.ndarray:
    """Return weights (experts, hidden, units) as (experts * units, hidden)."""
    return values.swapaxes(1, 2).reshape(-1, values.shape[1])


def _given(node: onnx.NodeProto, place: int) -> bool:
    return len(node.input) > place and node.input[place] != ""
