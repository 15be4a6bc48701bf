"""Smaller weights for decoders: int8 with int8 activations, or int8 and int4 weights alone.

`int8`: weights per output channel, activations per token, both symmetric; the product is the engine's own
(builder/engines/eight_bit.py). `int8-weights` and `int4-weights`: MatMulNBits, blocks of inputs with a scale each,
activations quantised in the same blocks.

A token embedding is int8 with a scale a row in each of them; where it is the output matrix too, it is stored once.
Knows graphs; knows nothing about quality.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import helper

from builder.engines.eight_bit import eight_bit_products
from builder.errors import VerificationError
from builder.export.projections import spell_out_gemms
from builder.onnx.cleanup import drop_unused
from builder.onnx.graph import Graph, load_graph, save_graph
from builder.onnx.nodes import add_constant, constant_products, eight_bit_lookup, replace_nodes
from builder.onnx.weights import values_of
from builder.optimise.grids import Blocks, Grids
from builder.optimise.quantised import Quantised
from builder.spec import WeightOptions

BITS = {"int8-weights": 8, "int4-weights": 4}
ACCURACY_INT8 = 4  # MatMulNBits: 8-bit activations
SYMMETRIC = {4: 0x88, 8: 0x80}  # bytes of zero points in the middle, by bits


def quantise_weights(
    graph: Graph, precision: str, options: WeightOptions, folder: Path, grids: Grids | None = None
) -> Quantised:
    """Write `graph` at `precision` into `folder`. Raises VerificationError where a product was missed.

    `grids`: those that a checkpoint of as many bits has its matrices on. Such a matrix is stored as it is, and what the
    checkpoint leaves real, as a rule its output matrix, in 8 bits.
    """
    model = load_graph(graph.path)
    spell_out_gemms(model.graph)  # ONNX Runtime's optimiser makes some of MatMul and Add again
    heads = {node.output[0] for node in tied_heads(model.graph)}
    products = {node.output[0] for node in constant_products(model.graph)}
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    small = eight_bit_products(graph.engine, model.graph)
    stored = grids if grids is not None and not grids.scattered and BITS.get(precision) == grids.bits else None
    nodes: list[onnx.NodeProto] = []
    embeddings = 0
    for node in model.graph.node:
        if node.output[0] in heads:
            nodes.extend(small.by_rows(node, values_of(tensors[node.input[1]])))
        elif node.output[0] in products and (stored is not None or precision not in BITS):
            matrix = values_of(tensors[node.input[1]])
            blocks = stored.blocks(matrix) if stored is not None else None
            nodes.extend(small.by_columns(node, matrix) if blocks is None else [in_blocks(model.graph, node, blocks)])
        elif node.op_type == "Gather" and node.input[1] == "input_ids" and node.input[0] in tensors:
            nodes.extend(eight_bit_lookup(model.graph, node, values_of(tensors[node.input[0]])))
            embeddings += 1
        else:
            nodes.append(node)
    replace_nodes(model.graph, nodes)
    if precision in BITS and stored is None:
        model = blockwise(model, BITS[precision], options)
    drop_unused(model.graph)
    if not any(entry.domain == "com.microsoft" for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    result = replace(save_graph(model, folder / precision / graph.path.name), engine=graph.engine)
    done = result.operators[small.operator] + result.operators["MatMulNBits"]
    refuse_missed(len(heads) + len(products), done, model.graph)
    return Quantised(result, done, embeddings)


def refuse_missed(expected: int, done: int, graph: onnx.GraphProto) -> None:
    """Raise VerificationError unless all of the `expected` products are `done`, and none is left in `graph`."""
    left = _unquantised(graph)
    if not expected or done != expected or left:
        raise VerificationError(
            f"{done} of {expected + len(left)} matrix products were quantised"
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


def in_blocks(graph: onnx.GraphProto, node: onnx.NodeProto, blocks: Blocks) -> onnx.NodeProto:
    """MatMulNBits for `node`, whose matrix is `blocks`; `graph` gains its constants."""
    bits, name = blocks.bits, node.input[1]
    parts = {"codes": blocks.codes, "scales": blocks.scales, "zeros": blocks.zeros}
    if (blocks.zeros == SYMMETRIC[bits]).all():  # what is meant without a zero point
        del parts["zeros"]
    for part, values in parts.items():
        if all(tensor.name != f"{name}.{part}" for tensor in graph.initializer):
            add_constant(graph, f"{name}.{part}", values)
    return helper.make_node(
        "MatMulNBits",
        [node.input[0], *(f"{name}.{part}" for part in parts)],
        list(node.output),
        node.name,
        domain="com.microsoft",
        K=blocks.inputs,
        N=len(blocks.codes),
        bits=bits,
        block_size=blocks.size,
        accuracy_level=ACCURACY_INT8,
    )


@contextmanager
def _root_logger_left_alone() -> Iterator[None]:
    """Within it, logging.basicConfig, which that module calls as it is imported, changes nothing."""
    handler = logging.NullHandler()  # where the root logger has one, basicConfig leaves it as it is
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)
