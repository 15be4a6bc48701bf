"""Attention in a band, in blocks: what each token costs does not grow with the length of the text.

An export writes one MultiHeadAttention in which each token sees `band` tokens on each side, and the last key, which is
no token's. Here its tokens are split into blocks, which become rows: a block's queries meet the keys of the block, of
`band` tokens before and after it, and the last. A text of no more than one block has no tokens around it, and costs
what attention without a band costs. Knows graphs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from builder.graphs.onnx.cleanup import drop_unused
from builder.graphs.onnx.graph import Graph, has_bias_for_all_heads, load_graph, save_graph
from builder.graphs.onnx.nodes import add_constant, add_constant_once, attributes_of, replace_nodes
from builder.graphs.onnx.operators import ATTENTION, ATTENTION_BIAS, FOR_ALL_HEADS

BAND = "band"  # attribute that an exported node has until it is split; its padding mask leaves the last key out
BANDS_IN_A_BLOCK = 2  # two thirds of a longer text's scores count, and a block is large enough for fast products
HIDDEN = -10000.0  # mask_filter_value of MultiHeadAttention
PADDING_MASK = 4  # its place among the inputs


def split_bands(model: onnx.ModelProto) -> None:
    """Split each exported attention in a band into blocks, in place; those with one mask share its form by blocks."""
    graph = model.graph
    nodes: list[onnx.NodeProto] = []
    made: set[str] = set()
    for node in graph.node:
        attributes = attributes_of(node) if node.op_type == ATTENTION else {}
        if BAND not in attributes:
            nodes.append(node)
            continue
        padding, band = node.input[PADDING_MASK], attributes[BAND]
        of = f"{padding}.band_{band}"
        if of not in made:
            made.add(of)
            nodes.extend(_blocks(graph, of, padding, band))
        nodes.extend(_split(graph, node, of))
    if made:
        replace_nodes(graph, nodes)
        drop_unused(graph)


def repeat_biases(graph: Graph, folder: Path) -> Graph:
    """Write `graph` into `folder` with each bias for all heads repeated for each of them; return it without one."""
    model = load_graph(graph.path)
    nodes: list[onnx.NodeProto] = []
    made: set[str] = set()
    for node in model.graph.node:
        if has_bias_for_all_heads(node):
            bias, heads = node.input[ATTENTION_BIAS], attributes_of(node)["num_heads"]
            repeated = node.input[ATTENTION_BIAS] = f"{bias}.{heads}"
            if repeated not in made:
                made.add(repeated)
                add_constant(model.graph, f"{repeated}.shape", np.array([1, heads, 1, 1], np.int64))
                nodes.append(helper.make_node("Expand", [bias, f"{repeated}.shape"], [repeated]))
        nodes.append(node)
    if not made:
        return graph
    replace_nodes(model.graph, nodes)
    return save_graph(model, folder / "repeated-biases" / graph.path.name)


def _blocks(graph: onnx.GraphProto, of: str, padding: str, band: int) -> Iterator[onnx.NodeProto]:
    """Yield nodes that make the form by blocks of texts padded by `padding`, (batch, sequence).

    Their results: `of`.queries (blocks, block): places of each block's tokens; `of`.keys (blocks, keys): places of the
    keys that they meet, those outside of the text replaced by its first or last; `of`.for_all_heads (batch * blocks, 1,
    block, keys): a bias that hides keys; `of`.sequence (1,): tokens of the longest text.
    """
    make = helper.make_node
    numbers = {"one": 1, "zero": 0, "band": band, "most": band * BANDS_IN_A_BLOCK, "minus": -1}
    for name, value in numbers.items():
        add_constant_once(graph, f"{of}.{name}", np.array([value], np.int64))
    for name, axis in (("scalar", 0), ("rows", 1), ("columns", 2)):
        add_constant_once(graph, f"{of}.{name}", np.array([axis], np.int64))
    for name, score in (("seen", 0.0), ("hidden", HIDDEN)):
        add_constant_once(graph, f"{of}.score.{name}", np.array(score, np.float32))

    def combine(operator: str, first: str, second: str, result: str) -> onnx.NodeProto:
        return make(operator, [f"{of}.{first}", f"{of}.{second}"], [f"{of}.{result}"])

    yield make("Shape", [padding], [f"{of}.sequence"], start=1, end=2)
    yield combine("Min", "sequence", "most", "block")
    yield combine("Sub", "sequence", "block", "beyond")
    yield combine("Min", "beyond", "one", "is.longer")
    yield combine("Mul", "is.longer", "band", "around")  # of a text of one block, no keys are outside of it
    yield combine("Add", "sequence", "block", "up")
    yield combine("Sub", "up", "one", "rounded.up")
    yield combine("Div", "rounded.up", "block", "count")
    yield combine("Sub", "zero", "around", "first")
    yield combine("Add", "block", "around", "last")
    for name in ("zero", "one", "count", "block", "first", "last"):
        yield make("Squeeze", [f"{of}.{name}", f"{of}.scalar"], [f"{of}.{name}.alone"])
    for start, stop, result in (("zero", "count", "indices"), ("zero", "block", "own"), ("first", "last", "near")):
        limits = [f"{of}.{start}.alone", f"{of}.{stop}.alone", f"{of}.one.alone"]
        yield make("Range", limits, [f"{of}.{result}"])
    yield combine("Mul", "indices", "block", "starts")
    yield make("Unsqueeze", [f"{of}.starts", f"{of}.rows"], [f"{of}.starts.rows"])
    yield combine("Add", "starts.rows", "own", "places")
    yield combine("Add", "starts.rows", "near", "key.places")
    yield combine("Sub", "sequence", "one", "final")
    yield combine("Min", "places", "final", "queries")
    yield combine("Min", "key.places", "final", "not.after")
    yield combine("Max", "not.after", "zero", "text.keys")
    yield combine("Equal", "key.places", "text.keys", "is.inside")
    # The scores: a key counts if it is inside of the text, not padding, and near.
    yield make("Unsqueeze", [f"{of}.places", f"{of}.columns"], [f"{of}.places.columns"])
    yield make("Unsqueeze", [f"{of}.key.places", f"{of}.rows"], [f"{of}.key.places.rows"])
    yield combine("Sub", "places.columns", "key.places.rows", "apart")
    yield make("Abs", [f"{of}.apart"], [f"{of}.distance"])
    yield combine("LessOrEqual", "distance", "band", "is.near")
    yield make("Unsqueeze", [f"{of}.is.inside", f"{of}.rows"], [f"{of}.is.inside.rows"])
    yield combine("And", "is.near", "is.inside.rows", "can.be.seen")  # (blocks, block, keys)
    yield make("Cast", [padding], [f"{of}.counts"], to=TensorProto.BOOL)
    yield make("Gather", [f"{of}.counts", f"{of}.text.keys"], [f"{of}.keys.count"], axis=1)  # (batch, blocks, keys)
    yield make("Unsqueeze", [f"{of}.keys.count", f"{of}.columns"], [f"{of}.keys.count.rows"])
    yield combine("And", "can.be.seen", "keys.count.rows", "is.seen")
    yield make("Where", [f"{of}.is.seen", f"{of}.score.seen", f"{of}.score.hidden"], [f"{of}.scores"])
    yield make("Shape", [f"{of}.near"], [f"{of}.near.count"])
    yield make("Concat", [f"{of}.minus", f"{of}.one", f"{of}.block", f"{of}.near.count"], [f"{of}.shape"], axis=0)
    yield make("Reshape", [f"{of}.scores", f"{of}.shape"], [f"{of}.scores.rows"])
    add_constant_once(graph, f"{of}.pads", np.array([0, 0, 0, 0, 0, 0, 0, 1], np.int64))
    yield make("Pad", [f"{of}.scores.rows", f"{of}.pads", f"{of}.score.seen"], [f"{of}{FOR_ALL_HEADS}"])
    yield make("Concat", [f"{of}.count", f"{of}.one"], [f"{of}.column"], axis=0)
    yield make("Expand", [f"{of}.sequence", f"{of}.column"], [f"{of}.last.key"])
    yield make("Concat", [f"{of}.text.keys", f"{of}.last.key"], [f"{of}.keys"], axis=1)


def _split(graph: onnx.GraphProto, node: onnx.NodeProto, of: str) -> Iterator[onnx.NodeProto]:
    """Yield the attention `node` over blocks, and nodes that make them of its tokens, and tokens of them."""
    make, output = helper.make_node, node.output[0]
    for place, (name, places) in enumerate((("query", "queries"), ("key", "keys"), ("value", "keys"))):
        parts, rows = f"{output}.{name}.blocks", f"{output}.{name}.rows"
        yield make("Gather", [node.input[place], f"{of}.{places}"], [parts], axis=1)  # (batch, blocks, block, size)
        yield make("Shape", [parts], [f"{parts}.sizes"], start=2)
        yield make("Concat", [f"{of}.minus", f"{parts}.sizes"], [f"{rows}.shape"], axis=0)
        yield make("Reshape", [parts, f"{rows}.shape"], [rows])
        node.input[place] = rows
    while len(node.input) <= ATTENTION_BIAS:
        node.input.append("")
    node.input[PADDING_MASK], node.input[ATTENTION_BIAS] = "", f"{of}{FOR_ALL_HEADS}"
    node.attribute.remove(next(attribute for attribute in node.attribute if attribute.name == BAND))
    node.output[0] = f"{output}.blocks"
    yield node
    # The rows of a text, one after the other, and without those that fill its last block.
    yield make("Shape", [f"{output}.blocks"], [f"{output}.size"], start=2)
    yield make("Shape", [f"{output}.query.blocks"], [f"{output}.batch"], end=1)
    yield make("Concat", [f"{output}.batch", f"{of}.minus", f"{output}.size"], [f"{output}.shape"], axis=0)
    yield make("Reshape", [f"{output}.blocks", f"{output}.shape"], [f"{output}.all"])
    yield make("Slice", [f"{output}.all", f"{of}.zero", f"{of}.sequence", f"{of}.rows"], [output])
