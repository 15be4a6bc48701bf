"""Translate layers that keep a state to OpenVINO's operators over tables, whose rows they read and write in place.

OpenVINO 2026.4 has PagedCausalConv1D, PagedGatedDeltaNet and PagedSelectiveSSM, and its Python has no constructor of
them. Its conversion of a model to paged attention creates them, so each is taken out of a converted model of a few
nodes, and given the inputs of a layer. These inputs, in order: openvino, src/core/dev_api/openvino/op/paged_*.hpp.
Knows shapes; knows nothing about requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...open_vino import ConversionExtension, openvino, paged_attention_transformation
from .openvino_graph import DOMAIN, STATE_INPUTS
from .paged import CONVOLUTION, GATED, GATED_DELTA

ops = openvino.opset13

SLOWEST = np.float32(1e-20)  # a rate of decay that is none in float32

Layer = Callable[[Any], "tuple[Any, Any, list[Any]]"]  # from its state to its output, its new state and its inputs


def state_extensions() -> "list[ConversionExtension]":
    """Return the translations of layers that keep a state, for a Core that reads a graph with them."""
    return [
        ConversionExtension(CONVOLUTION, DOMAIN, _translate_convolution),
        ConversionExtension(GATED_DELTA, DOMAIN, _translate_gated_delta),
        ConversionExtension(GATED, DOMAIN, _translate_gated),
    ]


def _translate_convolution(node: Any) -> "list[Any]":
    """Translate a convolution.

    Its inputs: tokens (1, tokens, channels), weight (channels, 1, width), table, `STATE_INPUTS` and, if any, bias.
    """
    tokens, weight, table, *places = _inputs(node)
    channels = table.get_partial_shape()[1].get_length()
    bias = places[len(STATE_INPUTS) :] or [ops.constant(np.zeros(0, np.float32)).output(0)]
    operator = _created(CONVOLUTION, (1, 1, 2), _convolution)
    operator.set_arguments([_rows(tokens, channels), table, weight, *bias, *places[: len(STATE_INPUTS)]])
    output = _as_one_row(operator, channels)
    return [(ops.swish(output) if node.get_attribute("activation") == "silu" else output).output(0)]


def _translate_gated_delta(node: Any) -> "list[Any]":
    """Translate a gated delta rule. Its inputs: see `_Recurrence`; rates: decay and beta."""
    layer = _Recurrence(node)
    # The operator divides a query by the root of its size.
    query = layer.query(layer.key_size**0.5)
    operator = _created(GATED_DELTA, (1, 1, 2, 2), _gated_delta)
    operator.set_arguments([query, layer.key, layer.value, layer.table, *layer.rates, *layer.places])
    return [layer.answer(operator)]


def _translate_gated(node: Any) -> "list[Any]":
    """Translate a decaying state. Its inputs: see `_Recurrence`; rates: decay.

    The operator is the scan of Mamba 2, state = exp(A dt) state + dt B x. With A = -1, dt is the decay without its
    sign, which is never above zero, and x the value divided by it.
    """
    layer = _Recurrence(node)
    (decay,) = layer.rates
    step = ops.maximum(ops.negative(decay), SLOWEST)
    values = ops.divide(layer.value, ops.unsqueeze(step, np.int64(-1))).output(0)
    rates = ops.constant(np.full(layer.heads, -1, np.float32)).output(0)
    operator = _created(GATED, (1, 2, 2, 2), _selective_scan)
    operator.set_arguments([rates, step.output(0), layer.key, values, layer.query(1.0), layer.table, *layer.places])
    return [layer.answer(operator)]


class _Recurrence:
    """Inputs of a recurrence, for all tokens of a call.

    Of the node: query, key and value (1, tokens, heads * size), table (slots, heads, value size, key size),
    `STATE_INPUTS`, and `rates` (1, tokens, heads).
    """

    def __init__(self, node: Any) -> None:
        query, key, value, self.table, *others = _inputs(node)
        self.heads, self.size, self.key_size = (self.table.get_partial_shape()[axis].get_length() for axis in (1, 2, 3))
        key_heads, self.scale = int(node.get_attribute("q_num_heads")), node.get_attribute("scale")
        self.unscaled, self.key = (_rows(one, key_heads, self.key_size) for one in (query, key))
        self.value = _rows(value, self.heads, self.size)
        self.places = others[: len(STATE_INPUTS)]
        self.rates = [_rows(rate, self.heads) for rate in others[len(STATE_INPUTS) :]]

    def query(self, factor: float) -> Any:
        """Return the query, multiplied by its scale and by `factor`."""
        return ops.multiply(self.unscaled, np.float32(self.scale * factor)).output(0)

    def answer(self, operator: Any) -> Any:
        """Return the result of `operator`, which has new inputs, as (1, tokens, heads * size)."""
        return _as_one_row(operator, self.heads * self.size).output(0)


def _inputs(node: Any) -> "list[Any]":
    return [node.get_input(index) for index in range(node.get_input_size())]


def _rows(values: Any, *sizes: int) -> Any:
    """Reshape `values`, (1, tokens, ...), to (tokens, *sizes)."""
    return ops.reshape(values, _whole(-1, *sizes), False).output(0)


def _as_one_row(operator: Any, size: int) -> Any:
    """Reshape the result of `operator`, which has new inputs, to (1, tokens, size)."""
    operator.constructor_validate_and_infer_types()
    return ops.reshape(operator, _whole(1, -1, size), False)


def _created(name: str, shape: "Sequence[int]", layer: Layer) -> Any:
    """Return an operator `name`, out of a converted model of one `layer` with a state of `shape`."""
    facts = openvino.op.util.VariableInfo()
    facts.variable_id, facts.data_type, facts.data_shape = "state", openvino.Type.f32, openvino.PartialShape(shape)
    variable = openvino.op.util.Variable(facts)
    output, state, inputs = layer(openvino.op.read_value(ops.constant(np.zeros(shape, np.float32)), variable))
    ids = ops.parameter([-1, -1], np.int64, "input_ids")
    ids.output(0).set_names({"input_ids"})
    tokens = ops.unsqueeze(ops.convert(ids, "f32"), _whole(0, 1))
    attention = ops.scaled_dot_product_attention(tokens, tokens, tokens)  # the conversion requires attention
    results = [ops.result(output), ops.result(attention)]
    model = openvino.Model(results, [openvino.op.assign(state, variable)], [ids, *inputs], name)
    paged_attention_transformation(model)
    for operator in model.get_ordered_ops():
        if operator.get_type_name() == name:
            return operator
    raise RuntimeError(
        f"this OpenVINO, {openvino.__version__}, does not create {name}: install the version that build-repo's "
        "requirements.txt pins"
    )


def _convolution(past: Any) -> "tuple[Any, Any, list[Any]]":
    """Return a convolution of one channel, of width 2, as the conversion recognises it."""
    tokens, weight = ops.parameter([1, 1, -1], np.float32), ops.constant(np.zeros((1, 1, 1, 2), np.float32))
    every = ops.concat([past, tokens], -1)
    convolved = ops.group_convolution(every, weight, [1], [0], [0], [1])
    first, last, step, axis = _whole(1), _whole(np.iinfo(np.int64).max), _whole(1), _whole(2)
    return ops.slice(convolved, first, last, step, axis), ops.slice(every, _whole(-2), last, step, axis), [tokens]


def _gated_delta(past: Any) -> "tuple[Any, Any, list[Any]]":
    """Return a loop over tokens (1, 1, tokens, 2) and rates (1, 1, tokens), as the conversion recognises it."""
    inputs = query, key, value, decay, beta = _parameters(*[[1, 1, -1, 2]] * 3, *[[1, 1, -1]] * 2)
    size = ops.convert(ops.gather(ops.shape_of(query), np.int64(3), np.int64(0)), "f32")
    scaled = ops.divide(query, ops.power(size, np.float32(0.5)))

    one = token_query, token_key, token_value, token_decay, token_beta = _parameters(
        *[[-1, -1, 1, -1]] * 3, *[[-1, -1, 1]] * 2
    )
    (state,) = _parameters([-1] * 4)
    row_query, row_key, row_value = (ops.squeeze(each, np.int32(2)) for each in (token_query, token_key, token_value))
    column = ops.unsqueeze(row_key, _whole(-1))
    decayed = ops.multiply(state, ops.unsqueeze(ops.exp(token_decay), _whole(-1)))
    known = ops.reduce_sum(ops.multiply(decayed, column), _whole(-2), False)
    change = ops.multiply(ops.subtract(row_value, known), token_beta)
    changed = ops.add(decayed, ops.multiply(column, ops.unsqueeze(change, _whole(-2))))
    read = ops.multiply(changed, ops.unsqueeze(row_query, _whole(-1)))
    output = ops.reduce_sum(read, _whole(-2), True)
    every = scaled, key, value, decay, beta
    return *_loop(2, list(zip(one, every)), (state, past, changed), output, value), inputs


def _selective_scan(past: Any) -> "tuple[Any, Any, list[Any]]":
    """Return a loop over tokens of two heads, (1, tokens, 2, 2), as the conversion recognises it."""
    inputs = rate, step, key, value, query = _parameters([2], [1, -1, 2], [1, -1, 1, 2], [1, -1, 2, 2], [1, -1, 1, 2])

    def for_heads(values: Any) -> Any:
        tiled = ops.tile(ops.unsqueeze(values, _whole(3)), _whole(1, 1, 1, 2, 1))
        return ops.reshape(tiled, _whole(0, 0, -1, 2), True)

    decay = ops.reshape(ops.exp(ops.multiply(rate, step)), _whole(0, 0, 0, 1, 1), True)
    keys = ops.multiply(ops.unsqueeze(step, _whole(-1)), for_heads(key))
    written = ops.multiply(ops.unsqueeze(keys, _whole(-2)), ops.unsqueeze(value, _whole(-1)))
    read = ops.unsqueeze(for_heads(query), _whole(-2))

    one = _parameters(*[[-1, 1, -1, -1, -1]] * 3)
    (state,) = _parameters([-1] * 4)
    of_decay, of_written, of_read = (ops.squeeze(each, np.int32(1)) for each in one)
    changed = ops.add(ops.multiply(state, of_decay), of_written)
    output = ops.unsqueeze(ops.reduce_sum(ops.multiply(changed, of_read), np.int32(-1), False), np.int32(1))
    every = decay, written, read
    return *_loop(1, list(zip(one, every)), (state, past, changed), output, value), inputs


def _loop(
    axis: int, sliced: "Sequence[tuple[Any, Any]]", states: "tuple[Any, Any, Any]", output: Any, shaped: Any
) -> "tuple[Any, Any]":
    """Return the outputs of a loop over the `axis` of tokens, and its last state.

    `sliced`: each parameter for one token, with the values of all; `states`: a parameter, the first state, and that
    after a token; `output`: of one token; `shaped`: values shaped like all outputs.
    """
    token, (outputs,) = ops.parameter([], np.int32), _parameters([-1] * 4)
    state, first, changed = states
    gathered = ops.scatter_update(outputs, ops.unsqueeze(token, _whole(0)), output, np.int32(axis))
    lengths, always = ops.shape_of(shaped), ops.constant([True], np.bool_)
    loop = ops.loop(ops.convert(ops.gather(lengths, _whole(axis), np.int64(0)), "i32"), always)
    results = [ops.result(value) for value in (ops.constant([True], np.bool_), changed, gathered)]
    loop.set_function(openvino.Model(results, [token, *(one for one, _ in sliced), state, outputs], "token"))
    for parameter, every in sliced:
        loop.set_sliced_input(parameter, every.output(0), 0, 1, 1, -1, axis)
    loop.set_merged_input(state, first.output(0), changed.output(0))
    loop.set_merged_input(outputs, ops.broadcast(np.float32(0), lengths).output(0), gathered.output(0))
    loop.set_special_body_ports([0, 0])
    answer, last = (loop.get_iter_value(one.output(0), -1) for one in (gathered, changed))
    return answer, ops.convert(last, "f32")


def _parameters(*shapes: "list[int]") -> "list[Any]":
    return [ops.parameter(shape, np.float32) for shape in shapes]


def _whole(*numbers: int) -> Any:
    return ops.constant(np.array(numbers, np.int64))
