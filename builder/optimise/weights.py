"""Smaller weights for decoders: int8 with int8 activations, or int8 and int4 weights alone.

`int8`: weights per output channel, activations per token, both symmetric; the product is an 8-bit dot product. One
scale a token, not one a call as DynamicQuantizeLinear has, makes a row's answer independent of the rows beside it:
what a request gets does not depend on who else is served. `int8-weights` and `int4-weights`: MatMulNBits, blocks of
inputs with a scale each, activations quantised in the same blocks.

A token embedding is int8 with a scale a row in each of them; where it is the output matrix too, it is stored once.
Knows graphs; knows nothing about quality.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from builder.errors import VerificationError
from builder.export.projections import spell_out_gemms
from builder.onnx.cleanup import drop_unused
from builder.onnx.graph import Graph, save_graph
from builder.onnx.nodes import (
    add_constant,
    constant_products,
    eight_bit_lookup,
    eight_bit_scales,
    replace_nodes,
    store_eight_bit,
)

BITS = {"int8-weights": 8, "int4-weights": 4}
ACCURACY_INT8 = 4  # MatMulNBits: 8-bit activations


@dataclass(frozen=True)
class WeightOptions:
    """Of weight-only quantisation: inputs that share a scale, and whether a block has a zero point."""

    block_size: int
    symmetric: bool


@dataclass(frozen=True)
class Quantised:
    """A graph and how many of its products and lookups are quantised."""

    graph: Graph
    matmuls: int
    embeddings: int


def quantise_weights(graph: Graph, precision: str, options: WeightOptions, folder: Path) -> Quantised:
    """Write `graph` at `precision` into `folder`. Raises VerificationError where a product was missed."""
    model = onnx.load(str(graph.path))
    spell_out_gemms(model.graph)  # ONNX Runtime's optimiser makes some of MatMul and Add again
    expected = sum(1 for _ in constant_products(model.graph)) + len(tied_heads(model.graph))
    embeddings = _eight_bit_tables(model.graph)
    _eight_bit_products(model.graph, constant_products(model.graph) if precision == "int8" else [])
    if precision in BITS:
        model = blockwise(model, BITS[precision], options)
    drop_unused(model.graph)
    if not any(entry.domain == "com.microsoft" for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    result = save_graph(model, folder / precision / graph.path.name)
    done = result.operators["MatMulIntegerToFloat"] + result.operators["MatMulNBits"]
    refuse_missed(expected, done, model.graph)
    return Quantised(result, expected, embeddings)


def refuse_missed(expected: int, done: int, graph: onnx.GraphProto) -> None:
    """Raise VerificationError unless all of the `expected` products are `done`, and none is left in `graph`."""
    left = _unquantised(graph)
    if not expected or done != expected or left:
        raise VerificationError(
            f"of {expected + len(left)} matrix products {done} were quantised"
            + (f", not {left[0]}" if left else "")
            + "; nothing was published. Use --precision fp32 for this checkpoint"
        )


def _unquantised(graph: onnx.GraphProto) -> list[str]:
    """Products, by whatever operator, that still read a constant matrix of real numbers."""
    matrices = {t.name for t in graph.initializer if len(t.dims) == 2 and t.data_type == onnx.TensorProto.FLOAT}
    transposed = {node.output[0] for node in graph.node if node.op_type == "Transpose" and node.input[0] in matrices}
    return [
        node.name or node.output[0]
        for node in graph.node
        if node.op_type in ("MatMul", "Gemm", "FusedMatMul") and node.input[1] in matrices | transposed
    ]


def tied_heads(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Gemm nodes that read a matrix by its rows, as the table of a lookup is stored."""
    weights = {tensor.name for tensor in graph.initializer}
    return [
        node
        for node in graph.node
        if node.op_type == "Gemm"
        and node.input[1] in weights
        and any(a.name == "transB" and a.i for a in node.attribute)
        and len(node.input) == 2
    ]


def _eight_bit_tables(graph: onnx.GraphProto) -> int:
    """Token tables to int8 with a scale a row, shared with the output matrix where that is tied to them."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    heads = {node.input[1]: node for node in tied_heads(graph)}
    count = 0
    nodes = []
    for node in graph.node:
        lookup = node.op_type == "Gather" and node.input[1] == "input_ids" and node.input[0] in weights
        if node.op_type == "Gemm" and heads.get(node.input[1]) is not None:
            table = node.input[1]
            values = numpy_helper.to_array(weights[table])
            store_eight_bit(graph, table, values, axis=1)
            nodes.append(helper.make_node("Transpose", [f"{table}.int8"], [f"{table}.columns"], perm=[1, 0]))
            nodes.extend(_product(node.input[0], node.output[0], f"{table}.columns", f"{table}.scale.flat", table))
            add_constant(
                graph, f"{table}.scale.flat", eight_bit_scales(numpy_helper.to_array(weights[table]), 1).ravel()
            )
            add_constant(graph, f"{table}.zero", np.zeros(weights[table].dims[0], np.int8))
        elif lookup:
            nodes.extend(eight_bit_lookup(graph, node, numpy_helper.to_array(weights[node.input[0]])))
            count += 1
        else:
            nodes.append(node)
    replace_nodes(graph, nodes)
    return count


def _eight_bit_products(graph: onnx.GraphProto, products: Sequence[onnx.NodeProto]) -> None:
    """MatMul(x, W) -> x's scale * (int8(x) . int8(W)) * W's scales; activations of tied heads are rounded here too."""
    weights = {tensor.name: tensor for tensor in graph.initializer}
    chosen = {node.output[0] for node in products}
    add_constant(graph, "quantise.zero", np.array(128, np.uint8))
    add_constant(graph, "quantise.step", np.array(1 / 127, np.float32))
    add_constant(graph, "quantise.axis", np.array([-1], np.int64))
    nodes: list[onnx.NodeProto] = []
    rounded: set[str] = set()
    for node in graph.node:
        source = node.input[0] if node.input else ""
        reads = node.output[0] in chosen or node.op_type == "MatMulIntegerToFloat"
        if reads and source.removesuffix(".int8") not in rounded:
            source = source.removesuffix(".int8")
            nodes.extend(_round(source))
            rounded.add(source)
        if node.output[0] in chosen:
            name = node.input[1]
            store_eight_bit(graph, name, numpy_helper.to_array(weights[name]), axis=0)
            nodes.extend(_product(source, node.output[0], f"{name}.int8", f"{name}.scale.flat", name))
            add_constant(graph, f"{name}.scale.flat", eight_bit_scales(numpy_helper.to_array(weights[name]), 0).ravel())
            add_constant(graph, f"{name}.zero", np.zeros(weights[name].dims[1], np.int8))
        else:
            nodes.append(node)
    replace_nodes(graph, nodes)


def _round(source: str) -> list[onnx.NodeProto]:
    """Activations to 8 bits around 128, with one scale a token: the largest of its row over 127."""
    make: Callable[..., onnx.NodeProto] = helper.make_node
    return [
        make("Abs", [source], [f"{source}.abs"]),
        make("ReduceMax", [f"{source}.abs", "quantise.axis"], [f"{source}.most"], keepdims=1),
        make("Div", [source, f"{source}.most"], [f"{source}.shares"]),
        make("QuantizeLinear", [f"{source}.shares", "quantise.step", "quantise.zero"], [f"{source}.int8"]),
    ]


def _product(source: str, output: str, matrix: str, scales: str, name: str) -> list[onnx.NodeProto]:
    inputs = [f"{source}.int8", matrix, "quantise.step", scales, "quantise.zero", f"{name}.zero"]
    return [
        helper.make_node("MatMulIntegerToFloat", inputs, [f"{output}.shares"], domain="com.microsoft"),
        helper.make_node("Mul", [f"{output}.shares", f"{source}.most"], [output]),
    ]


def blockwise(model: onnx.ModelProto, bits: int, options: WeightOptions) -> onnx.ModelProto:
    """Constant products as MatMulNBits of `bits` bits."""
    with _root_logger_left_alone():
        from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer
    config = DefaultWeightOnlyQuantConfig(
        block_size=options.block_size, is_symmetric=options.symmetric, accuracy_level=ACCURACY_INT8, bits=bits
    )
    quantiser = MatMulNBitsQuantizer(model, algo_config=config)
    quantiser.process()
    result: onnx.ModelProto = quantiser.model.model
    return result


@contextmanager
def _root_logger_left_alone() -> Iterator[None]:
    """Within it, logging.basicConfig, which that module calls as it is imported, changes nothing."""
    handler = logging.NullHandler()  # where the root logger has one, basicConfig leaves it as it is
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)
