"""Layers that keep a state, for OpenVINO: each becomes an operator over a table with the states of all slots.

Inputs of the graph beside those of attention (builder/engines/openvino/lowering.py):
  state_table.i.n              state n of layer i, (slots, ...) float32
  state_slots                  (2 * rows,) int32, where each row's state is read, and where it is written
  state_slots_begins           (rows + 1,) int32, where each row's slots begin
  state_interval               (rows,) int32, tokens after which a state would be kept too
The operators are this project's names for OpenVINO's own, which the emitted executor puts in their place
(builder/runtime/generation/executors/openvino_states.py). Knows graphs; knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import helper

from builder.common.errors import ExportError
from builder.graphs.onnx.cleanup import Shape
from builder.graphs.onnx.nodes import attributes_of
from builder.runtime.generation.executors.openvino_graph import DOMAIN, STATE_INPUTS, STATE_TABLE
from builder.runtime.generation.executors.paged import CONVOLUTION, GATED, GATED_DELTA

RULES = {"gated_delta": GATED_DELTA, "gated": GATED}
CONVOLVED, RECURRENT = "CausalConvWithState", "LinearAttention"


def table_name(past: str) -> str:
    """Return the table's name for `past`, past_state_i_n."""
    return STATE_TABLE + past.removeprefix("past_state_").replace("_", ".")


def page_state(node: onnx.NodeProto, shapes: Mapping[str, Shape], advice: str) -> dict[str, Sequence[int]]:
    """Let `node`, over the state of each row, read and write a table; return a row's shape there, by the table's name.

    Raises ExportError for a recurrence that OpenVINO has no operator for.
    """
    if node.op_type == CONVOLVED:
        return _page_convolution(node, shapes)
    if node.op_type != RECURRENT:
        raise ExportError(f"OpenVINO has no operator for the recurrence of its layers, a {node.op_type}; {advice}")
    attributes = attributes_of(node)
    rule, heads = attributes["update_rule"].decode(), attributes["kv_num_heads"]
    if rule not in RULES:
        raise ExportError(f"its layers keep a state by the {rule} rule, which OpenVINO has no operator for; {advice}")
    if shapes[node.input[4]][-1] != heads:
        raise ExportError(
            f"each number of its keys decays at its own rate, which OpenVINO's operators do not do; {advice}"
        )
    return _page_recurrence(node, RULES[rule], shapes)


def _page_convolution(node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> dict[str, Sequence[int]]:
    """Let `node` take tokens (1, tokens, channels), weight (channels, 1, width), table, ..., and bias if any."""
    tokens, weight, bias, past = node.input
    (_, before, channels), table = shapes[past], table_name(past)
    _rewrite(node, CONVOLUTION, [tokens, weight, table, *STATE_INPUTS, *filter(None, [bias])], "activation")
    return {table: (int(channels), int(before) + 1)}  # each token with those before it


def _page_recurrence(node: onnx.NodeProto, operator: str, shapes: Mapping[str, Shape]) -> dict[str, Sequence[int]]:
    """Let `node` take query, key, value (1, tokens, heads * size), table, ..., decay and, if any, beta."""
    query, key, value, past, *rates = node.input
    (_, heads, key_size, value_size), table = shapes[past], table_name(past)
    inputs = [query, key, value, table, *STATE_INPUTS, *filter(None, rates)]
    _rewrite(node, operator, inputs, "q_num_heads", "scale")
    return {table: (int(heads), int(value_size), int(key_size))}


def _rewrite(node: onnx.NodeProto, operator: str, inputs: list[str], *attributes: str) -> None:
    """Make `node` an `operator` over `inputs`, with those of its `attributes` alone, and its first output alone."""
    kept = [attribute for attribute in node.attribute if attribute.name in attributes]
    rewritten = helper.make_node(operator, inputs, node.output[:1], name=node.name, domain=DOMAIN)
    rewritten.attribute.extend(kept)
    node.CopyFrom(rewritten)
