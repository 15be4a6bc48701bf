"""Split attention in a band into blocks, so that the cost of a token does not grow with the length of the text.

An export writes one MultiHeadAttention in which each token sees `band` tokens on each side, and the last key, which
belongs to no token. Here its tokens are split into blocks, which become rows: a block's queries meet the keys of the
block, those of `band` tokens before and after it, and the last key. A text of at most one block has no tokens around
it, and costs what attention without a band costs. Knows graphs.
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
    """Split each exported attention in a band into blocks, in place; those with one mask share its blocks."""
    graph = model.graph
    nodes: list[onnx.NodeProto] = []
    created: set[str] = set()
    for node in graph.node:
        attributes = attributes_of(node) if node.op_type == ATTENTION else {}
        if BAND not in attributes:
            nodes.append(node)
            continue
        padding, band = node.input[PADDING_MASK], attributes[BAND]
        form = f"{padding}.band_{band}"
        if form not in created:
            created.add(form)
            nodes.extend(_blocks(graph, form, padding, band))
        nodes.extend(_split(graph, node, form))
    if created:
        replace_nodes(graph, nodes)
        drop_unused(graph)


def repeat_biases(graph: Graph, folder: Path) -> Graph:
    """Write `graph` into `folder` with each bias for all heads repeated for each of them; return it without one."""
    model = load_graph(graph.path)
    nodes: list[onnx.NodeProto] = []
    created: set[str] = set()
    for node in model.graph.node:
        if has_bias_for_all_heads(node):
            bias, heads = node.input[ATTENTION_BIAS], attributes_of(node)["num_heads"]
            repeated = node.input[ATTENTION_BIAS] = f"{bias}.{heads}"
            if repeated not in created:
                created.add(repeated)
                add_constant(model.graph, f"{repeated}.shape", np.array([1, heads, 1, 1], np.int64))
                nodes.append(helper.make_node("Expand", [bias, f"{repeated}.shape"], [repeated]))
        nodes.append(node)
    if not created:
        return graph
    replace_nodes(model.graph, nodes)
    return save_graph(model, folder / "repeated-biases" / graph.path.name)


def _blocks(graph: onnx.GraphProto, form: str, padding: str, band: int) -> Iterator[onnx.NodeProto]:
    """Yield nodes that compute the blocks of texts padded by `padding`, (batch, sequence).

    Their results, each with the prefix `form`: queries (blocks, block): places of each block's tokens; keys (blocks,
    keys): places of the keys that they meet, those outside of the text replaced by its first or last; for_all_heads
    (batch * blocks, 1, block, keys): a bias that hides keys; sequence (1,): tokens of the longest text.
    """
    make = helper.make_node
    numbers = {"one": 1, "zero": 0, "band": band, "most": band * BANDS_IN_A_BLOCK, "minus": -1}
    for name, value in numbers.items():
        add_constant_once(graph, f"{form}.{name}", np.array([value], np.int64))
    for name, axis in (("scalar", 0), ("rows", 1), ("columns", 2)):
        add_constant_once(graph, f"{form}.{name}", np.array([axis], np.int64))
    for name, score in (("seen", 0.0), ("hidden", HIDDEN)):
        add_constant_once(graph, f"{form}.score.{name}", np.array(score, np.float32))

    def combine(operator: str, first: str, second: str, result: str) -> onnx.NodeProto:
        return make(operator, [f"{form}.{first}", f"{form}.{second}"], [f"{form}.{result}"])

    yield make("Shape", [padding], [f"{form}.sequence"], start=1, end=2)
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
        yield make("Squeeze", [f"{form}.{name}", f"{form}.scalar"], [f"{form}.{name}.alone"])
    for start, stop, result in (("zero", "count", "indices"), ("zero", "block", "own"), ("first", "last", "near")):
        limits = [f"{form}.{start}.alone", f"{form}.{stop}.alone", f"{form}.one.alone"]
        yield make("Range", limits, [f"{form}.{result}"])
    yield combine("Mul", "indices", "block", "starts")
    yield make("Unsqueeze", [f"{form}.starts", f"{form}.rows"], [f"{form}.starts.rows"])
    yield combine("Add", "starts.rows", "own", "places")
    yield combine("Add", "starts.rows", "near", "key.places")
    yield combine("Sub", "sequence", "one", "final")
    yield combine("Min", "places", "final", "queries")
    yield combine("Min", "key.places", "final", "not.after")
    yield combine("Max", "not.after", "zero", "text.keys")
    yield combine("Equal", "key.places", "text.keys", "is.inside")
    # The scores: a key counts if it is inside of the text, not padding, and near.
    yield make("Unsqueeze", [f"{form}.places", f"{form}.columns"], [f"{form}.places.columns"])
    yield make("Unsqueeze", [f"{form}.key.places", f"{form}.rows"], [f"{form}.key.places.rows"])
    yield combine("Sub", "places.columns", "key.places.rows", "apart")
    yield make("Abs", [f"{form}.apart"], [f"{form}.distance"])
    yield combine("LessOrEqual", "distance", "band", "is.near")
    yield make("Unsqueeze", [f"{form}.is.inside", f"{form}.rows"], [f"{form}.is.inside.rows"])
    yield combine("And", "is.near", "is.inside.rows", "can.be.seen")  # (blocks, block, keys)
    yield make("Cast", [padding], [f"{form}.counts"], to=TensorProto.BOOL)
    yield make(
        "Gather", [f"{form}.counts", f"{form}.text.keys"], [f"{form}.keys.count"], axis=1
    )  # (batch, blocks, keys)
    yield make("Unsqueeze", [f"{form}.keys.count", f"{form}.columns"], [f"{form}.keys.count.rows"])
    yield combine("And", "can.be.seen", "keys.count.rows", "is.seen")
    yield make("Where", [f"{form}.is.seen", f"{form}.score.seen", f"{form}.score.hidden"], [f"{form}.scores"])
    yield make("Shape", [f"{form}.near"], [f"{form}.near.count"])
    yield make(
        "Concat", [f"{form}.minus", f"{form}.one", f"{form}.block", f"{form}.near.count"], [f"{form}.shape"], axis=0
    )
    yield make("Reshape", [f"{form}.scores", f"{form}.shape"], [f"{form}.scores.rows"])
    add_constant_once(graph, f"{form}.pads", np.array([0, 0, 0, 0, 0, 0, 0, 1], np.int64))
    yield make("Pad", [f"{form}.scores.rows", f"{form}.pads", f"{form}.score.seen"], [f"{form}{FOR_ALL_HEADS}"])
    yield make("Concat", [f"{form}.count", f"{form}.one"], [f"{form}.column"], axis=0)
    yield make("Expand", [f"{form}.sequence", f"{form}.column"], [f"{form}.last.key"])
    yield make("Concat", [f"{form}.text.keys", f"{form}.last.key"], [f"{form}.keys"], axis=1)


def _split(graph: onnx.GraphProto, node: onnx.NodeProto, form: str) -> Iterator[onnx.NodeProto]:
    """Yield nodes that split the tokens of `node` into blocks, the attention over them, and nodes that join them."""
    make, output = helper.make_node, node.output[0]
    for place, (name, places) in enumerate((("query", "queries"), ("key", "keys"), ("value", "keys"))):
        parts, rows = f"{output}.{name}.blocks", f"{output}.{name}.rows"
        yield make("Gather", [node.input[place], f"{form}.{places}"], [parts], axis=1)  # (batch, blocks, block, size)
        yield make("Shape", [parts], [f"{parts}.sizes"], start=2)
        yield make("Concat", [f"{form}.minus", f"{parts}.sizes"], [f"{rows}.shape"], axis=0)
        yield make("Reshape", [parts, f"{rows}.shape"], [rows])
        node.input[place] = rows
    while len(node.input) <= ATTENTION_BIAS:
        node.input.append("")
    node.input[PADDING_MASK], node.input[ATTENTION_BIAS] = "", f"{form}{FOR_ALL_HEADS}"
    node.attribute.remove(next(attribute for attribute in node.attribute if attribute.name == BAND))
    node.output[0] = f"{output}.blocks"
    yield node
    # The rows of a text, one after the other, and without those that fill its last block.
    yield make("Shape", [f"{output}.blocks"], [f"{output}.size"], start=2)
    yield make("Shape", [f"{output}.query.blocks"], [f"{output}.batch"], end=1)
    yield make("Concat", [f"{output}.batch", f"{form}.minus", f"{output}.size"], [f"{output}.shape"], axis=0)
    yield make("Reshape", [f"{output}.blocks", f"{output}.shape"], [f"{output}.all"])
    yield make("Slice", [f"{output}.all", f"{form}.zero", f"{form}.sequence", f"{form}.rows"], [output])
