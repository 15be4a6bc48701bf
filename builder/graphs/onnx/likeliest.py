"""The most probable next tokens, and the normaliser of their logits, as outputs of a decoder's graph.

A beam search reads few of a vocabulary's scores, but needs the sum of all their exponentials to have log-probabilities:
the graph finds both on all cores. Knows logits; knows nothing about beams.
"""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from builder.graphs.onnx.graph import Graph, load_graph, save_graph
from builder.graphs.onnx.nodes import constant
from builder.runtime.generation.executors.base import TOP_COUNT, TOP_LOGITS, TOP_TOKENS, TOP_TOTALS

OUTPUTS = {TOP_LOGITS: TensorProto.FLOAT, TOP_TOKENS: TensorProto.INT64, TOP_TOTALS: TensorProto.FLOAT}


def add_likeliest(model: onnx.ModelProto) -> None:
    """Add one input and three outputs, in place.

    `top_count`, (1,) int64: how many tokens to return, 0 for none, which takes no time: ONNX Runtime runs all nodes
    whichever outputs are asked for (microsoft/onnxruntime, issue 16483), and of an If the one branch.
    `top_logits`, (positions, count) float32, best first, and `top_tokens`, the same in int64, of equal ones the lower
    first; count is the vocabulary where that is less. `top_totals`, (positions, 1) float32: the logarithm of the sum of
    all logits' exponentials. They are chosen by logits, of which several may have one log-probability when it is
    rounded: rows that do not search use the highest logit beside a search too.
    """
    branches = {"then_branch": _found(), "else_branch": _nothing()}
    model.graph.node.extend(
        [
            # the condition depends on the logits too, so that any ordering sees the branch read them
            helper.make_node("Shape", ["logits"], ["top.vocabulary"], name="Shape.top", start=-1),
            helper.make_node("Min", [TOP_COUNT, "top.vocabulary"], ["top.count"], name="Min.top"),
            helper.make_node("Cast", ["top.count"], ["top.wanted"], name="Cast.top", to=TensorProto.BOOL),
            helper.make_node("If", ["top.wanted"], list(OUTPUTS), name="If.top", **branches),
        ]
    )
    model.graph.input.append(helper.make_tensor_value_info(TOP_COUNT, TensorProto.INT64, [1]))
    model.graph.output.extend(_outputs())


def finding_likeliest(graph: Graph) -> Graph:
    """Return `graph`, a decoder's, with the outputs that a search reads: in its own file, whose weights stay there."""
    model = load_graph(graph.path)
    add_likeliest(model)
    return save_graph(model, graph.path)


def _found() -> onnx.GraphProto:
    """Return the branch that computes the outputs.

    ReduceLogSumExp would do for the totals, but computes one exponential after the other (onnxruntime,
    reduction_ops.h), where LogSoftmax computes several at once (mlas/lib/compute.cpp).
    """
    found = ("found.logits", "found.tokens", "found.totals")
    nodes = [
        helper.make_node("TopK", ["logits", "top.count"], [*found[:2]], name="TopK.top"),
        helper.make_node("LogSoftmax", ["logits"], ["top.logprobs"], name="LogSoftmax.top", axis=-1),
        constant("top.first", [0]),
        helper.make_node("Gather", ["found.tokens", "top.first"], ["top.token"], name="Gather.token", axis=1),
        helper.make_node("Gather", ["found.logits", "top.first"], ["top.logit"], name="Gather.logit", axis=1),
        helper.make_node("GatherElements", ["top.logprobs", "top.token"], ["top.logprob"], name="Gather.top", axis=1),
        helper.make_node("Sub", ["top.logit", "top.logprob"], ["found.totals"], name="Sub.top"),
    ]
    return helper.make_graph(nodes, "likeliest", [], _outputs(found))


def _nothing() -> onnx.GraphProto:
    names = ("no.logits", "no.tokens", "no.totals")
    nodes = [
        helper.make_node("Constant", [], [name], name=name, value=helper.make_tensor(name, kind, [0, 0], []))
        for name, kind in zip(names, OUTPUTS.values(), strict=True)
    ]
    return helper.make_graph(nodes, "none", [], _outputs(names))


def _outputs(names: tuple[str, ...] = tuple(OUTPUTS)) -> list[onnx.ValueInfoProto]:
    kinds = zip(names, OUTPUTS.values(), strict=True)
    return [helper.make_tensor_value_info(name, kind, [None, None]) for name, kind in kinds]
