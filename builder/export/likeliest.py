"""The most probable next tokens and their log-probabilities as outputs of a decoder's graph, for beam searches.

A search reads few of a vocabulary's scores, but needs the sum of all their exponentials: the graph finds both on all
cores. Knows logits; knows nothing about beams.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from builder.runtime.generation.executors.candidates import TOP_COUNT, TOP_LOGPROBS, TOP_TOKENS

OUTPUTS = {TOP_LOGPROBS: TensorProto.FLOAT, TOP_TOKENS: TensorProto.INT64}


def add_likeliest(model: onnx.ModelProto) -> None:
    """In place: one more input and two more outputs.

    `top_count`, (1,) int64: how many tokens are wanted, 0 for none, which takes no time: ONNX Runtime runs all nodes
    whichever outputs are asked for (microsoft/onnxruntime, issue 16483), and of an If the one branch.
    `top_logprobs`, (positions, count) float32, best first, and `top_tokens`, the same in int64, of equal ones the lower
    first; count is the vocabulary where that is less.
    """
    model.graph.node.extend(_nodes())
    model.graph.input.append(helper.make_tensor_value_info(TOP_COUNT, TensorProto.INT64, [1]))
    model.graph.output.extend(_outputs())


def _nodes() -> list[onnx.NodeProto]:
    """The condition is made of the logits too, so that whoever orders the nodes sees that the branch reads them."""
    return [
        helper.make_node("Shape", ["logits"], ["top.vocabulary"], name="Shape.top", start=-1),
        helper.make_node("Min", [TOP_COUNT, "top.vocabulary"], ["top.count"], name="Min.top"),
        helper.make_node("Cast", ["top.count"], ["top.wanted"], name="Cast.top", to=TensorProto.BOOL),
        helper.make_node(
            "If", ["top.wanted"], list(OUTPUTS), name="If.top", then_branch=_found(), else_branch=_nothing()
        ),
    ]


def _found() -> onnx.GraphProto:
    nodes = [
        helper.make_node("LogSoftmax", ["logits"], ["top.logprobs"], name="LogSoftmax.top", axis=-1),
        helper.make_node("TopK", ["top.logprobs", "top.count"], ["found.logprobs", "found.tokens"], name="TopK.top"),
    ]
    return helper.make_graph(nodes, "likeliest", [], _outputs(("found.logprobs", "found.tokens")))


def _nothing() -> onnx.GraphProto:
    names = ("no.logprobs", "no.tokens")
    nodes = [
        helper.make_node("Constant", [], [name], name=name, value=helper.make_tensor(name, kind, [0, 0], []))
        for name, kind in zip(names, OUTPUTS.values(), strict=True)
    ]
    return helper.make_graph(nodes, "none", [], _outputs(names))


def _outputs(names: tuple[str, ...] = tuple(OUTPUTS)) -> list[onnx.ValueInfoProto]:
    kinds = zip(names, OUTPUTS.values(), strict=True)
    return [helper.make_tensor_value_info(name, kind, [None, None]) for name, kind in kinds]
