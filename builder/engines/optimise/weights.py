"""Smaller weights for decoders: int8 with int8 activations, or int8 and int4 weights alone.

`int8`: weights per output channel, activations per token, both symmetric; the product is the engine's own
(builder/engines/eight_bit.py). `int8-weights` and `int4-weights`: MatMulNBits, blocks of inputs with a scale each,
activations quantised in the same blocks, or on a GPU left in half precision. Experts are in blocks in all of them
(builder/engines/optimise/experts.py); routers stay as they are, because a rounded one chooses other experts.

A token embedding is int8 with a scale a row in each of them; where it is the output matrix too, it is stored once.
Knows graphs; knows nothing about quality.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import helper

from builder.checkpoints.grids import LARGEST_BLOCK, StoredWeights
from builder.common.errors import VerificationError
from builder.engines import graph_engine
from builder.engines.optimise import Quantised
from builder.engines.optimise.experts import block_of, quantised_experts
from builder.graphs.onnx.cleanup import drop_unused
from builder.graphs.onnx.experts import routers_of, run_all_experts
from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.nodes import constant_products, replace_nodes
from builder.graphs.onnx.operators import DOMAIN, EXPERTS, QUANTISED_EXPERTS
from builder.graphs.onnx.projections import spell_out_gemms
from builder.graphs.onnx.weights import computing, values_of
from builder.options import WeightOptions

BITS = {"int8-weights": 8, "int4-weights": 4}


def quantise_weights(
    graph: Graph,
    precision: str,
    options: WeightOptions,
    folder: Path,
    stored: StoredWeights | None = None,
    products_of: str | None = None,
) -> Quantised:
    """Write `graph` at `precision` into `folder`. Raises VerificationError if a product was missed.

    `products_of`: the engine whose products it gets, if that is not the graph's own.
    `stored`: the checkpoint's own codes. A matrix that has some for `precision` is stored as it is, and one that the
    checkpoint has in real numbers, usually its output matrix, in 8 bits.
    """
    with computing():
        return _quantise_weights(graph, precision, options, folder, stored, products_of)


def _quantise_weights(
    graph: Graph,
    precision: str,
    options: WeightOptions,
    folder: Path,
    stored: StoredWeights | None,
    products_of: str | None,
) -> Quantised:
    bits = BITS.get(precision, 8)
    model = load_graph(graph.path)
    spell_out_gemms(model.graph)  # ONNX Runtime's optimiser makes some of MatMul and Add again
    routers = routers_of(model.graph)
    block = block_of(model.graph, options.block_size if precision in BITS else LARGEST_BLOCK)
    if block is None:
        graph = run_all_experts(graph, folder)
        model = load_graph(graph.path)
        spell_out_gemms(model.graph)
    heads = {node.output[0] for node in tied_heads(model.graph)}
    products = {node.output[0] for node in constant_products(model.graph)}
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    small = graph_engine(products_of or graph.engine).eight_bit(model.graph)
    if stored is not None and (stored.scattered or precision not in stored.precisions):
        stored = None
    in_blocks = precision in BITS and (stored is None or stored.bits == bits == 8)  # what is not stored
    nodes: list[onnx.NodeProto] = []
    embeddings = experts = as_stored = rounded_experts = 0
    for node in model.graph.node:
        if node.output[0] in heads:
            nodes.extend(small.by_rows(node, values_of(tensors[node.input[1]])))
        elif node.output[0] in products and (stored is not None or not in_blocks):
            matrix = values_of(tensors[node.input[1]])
            blocks = stored.blocks(matrix, small.largest_block) if stored is not None else None
            as_stored += blocks is not None
            if blocks is not None:
                nodes.append(small.in_blocks(node, blocks))
                routers.discard(node.output[0])
            else:
                is_left = in_blocks or node.output[0] in routers
                nodes.extend([node] if is_left else small.by_columns(node, matrix))
        elif node.op_type == EXPERTS and block is not None:
            replaced = quantised_experts(model.graph, node, bits, replace(options, block_size=block), stored)
            nodes.append(replaced.node)
            experts += 1
            as_stored += replaced.as_stored
            rounded_experts += stored is not None and not replaced.as_stored
        elif node.op_type == "Gather" and node.input[1] == "input_ids" and node.input[0] in tensors:
            nodes.extend(small.lookup(node, values_of(tensors[node.input[0]])))
            embeddings += 1
        else:
            nodes.append(node)
    replace_nodes(model.graph, nodes)
    if in_blocks:
        model = blockwise(model, BITS[precision], options, small.accuracy, routers)
    drop_unused(model.graph)
    if not any(entry.domain == DOMAIN for entry in model.opset_import):
        model.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    result = replace(save_graph(model, folder / precision / graph.path.name), engine=graph.engine)
    done = sum(result.operators[name] for name in {small.operator, "MatMulNBits", QUANTISED_EXPERTS})
    refuse_missed(len(heads) + len(products - routers) + experts, done, model.graph, routers)
    return Quantised(result, done, embeddings, as_stored=as_stored, rounded_experts=rounded_experts)


def refuse_missed(expected: int, done: int, graph: onnx.GraphProto, left: Collection[str]) -> None:
    """Raise VerificationError unless all of the `expected` products are `done`, and no other is left in `graph`.

    `left`: the outputs of products that stay in fp32.
    """
    missed = _unquantised(graph, left)
    if not expected or done != expected or missed:
        raise VerificationError(
            f"{done} of {expected + len(missed)} matrix products were quantised"
            + (f", not {missed[0]}" if missed else "")
            + "; nothing was published. Use --precision fp32 for this checkpoint"
        )


def _unquantised(graph: onnx.GraphProto, left: Collection[str]) -> list[str]:
    """Return products, by whatever operator, that still read a constant matrix of real numbers; not those of `left`."""
    matrices = {t.name for t in graph.initializer if len(t.dims) == 2 and t.data_type == onnx.TensorProto.FLOAT}
    transposed = {node.output[0] for node in graph.node if node.op_type == "Transpose" and node.input[0] in matrices}
    return [
        node.name or node.output[0]
        for node in graph.node
        if node.op_type == EXPERTS
        or (
            node.op_type in ("MatMul", "Gemm", "FusedMatMul")
            and node.input[1] in matrices | transposed
            and node.output[0] not in left
        )
    ]


def tied_heads(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return Gemm nodes that read a matrix by its rows, as the table of a lookup is stored."""
    weights = {tensor.name for tensor in graph.initializer}
    return [
        node
        for node in graph.node
        if node.op_type == "Gemm"
        and node.input[1] in weights
        and any(a.name == "transB" and a.i for a in node.attribute)
        and len(node.input) == 2
    ]


def blockwise(
    model: onnx.ModelProto, bits: int, options: WeightOptions, accuracy: int, left: Collection[str] = ()
) -> onnx.ModelProto:
    """Return the model with constant products as MatMulNBits of `bits` bits, except those with outputs in `left`."""
    with _root_logger_left_alone():
        from onnxruntime.quantization.matmul_nbits_quantizer import DefaultWeightOnlyQuantConfig, MatMulNBitsQuantizer
    config = DefaultWeightOnlyQuantConfig(
        block_size=options.block_size, is_symmetric=options.symmetric, accuracy_level=accuracy, bits=bits
    )
    names = [node.name for node in model.graph.node if node.output[0] in left]
    quantiser = MatMulNBitsQuantizer(model, algo_config=config, nodes_to_exclude=names)
    quantiser.process()
    result: onnx.ModelProto = quantiser.model.model
    return result


@contextmanager
def _root_logger_left_alone() -> Iterator[None]:
    """Keep logging.basicConfig, which that module calls as it is imported, from changing anything."""
    handler = logging.NullHandler()  # with a handler, basicConfig leaves the root logger as it is
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)
