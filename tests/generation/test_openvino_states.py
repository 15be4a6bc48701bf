"""Layers that keep a state, in OpenVINO's operators over tables of states."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from builder.runtime.generation.executors import openvino_states
from builder.runtime.generation.executors.openvino import NO_INTERVAL
from builder.runtime.generation.executors.openvino_graph import DOMAIN, STATE_INPUTS
from builder.runtime.generation.executors.openvino_states import state_extensions
from builder.runtime.generation.executors.paged import GATED
from builder.runtime.open_vino import openvino

HEADS, KEYS, SIZE = 2, 4, 3
DECAYS = [0.0, -0.0, -1e-38, -1e-19, -1e-10, -0.5, -700.0, -1e30, -1.0, 0.0]  # logarithms, a token each


def decaying_layer(path: Path) -> Path:
    """Write a graph of one layer with a decaying state to `path`."""
    rows = [("query", KEYS), ("key", KEYS), ("value", HEADS * SIZE), ("decay", HEADS)]
    make, real, whole = helper.make_tensor_value_info, TensorProto.FLOAT, TensorProto.INT32
    inputs = [make(name, real, [1, None, size]) for name, size in rows[:3]]
    inputs += [make("table", real, [None, HEADS, SIZE, KEYS]), *(make(name, whole, [None]) for name in STATE_INPUTS)]
    inputs.append(make("decay", real, [1, None, HEADS]))
    names = [value.name for value in inputs]
    node = helper.make_node(GATED, names, ["read"], domain=DOMAIN, q_num_heads=1, scale=1.0)
    graph = helper.make_graph([node], "layer", inputs, [make("read", real, [1, None, HEADS * SIZE])])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def test_decaying_state_is_exact_at_any_rate_even_none(tmp_path: Path) -> None:
    """Divide values by the step that the operator multiplies them by: a rate of 0 makes it 0."""
    core, tokens, random = openvino.Core(), len(DECAYS), np.random.default_rng(0)
    core.add_extension(state_extensions())
    read = core.read_model(str(decaying_layer(tmp_path / "layer.onnx")))
    request = core.compile_model(read, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    sizes = {"query": KEYS, "key": KEYS, "value": HEADS * SIZE}
    feeds = {name: random.normal(size=(1, tokens, size)).astype(np.float32) for name, size in sizes.items()}
    feeds["decay"] = np.repeat(np.array(DECAYS, np.float32), HEADS).reshape(1, tokens, HEADS)
    table = random.normal(size=(2, HEADS, SIZE, KEYS)).astype(np.float32)
    other, state = table[0].copy(), table[1].astype(np.float64)
    places = ([0, tokens], [1, 1], [0, 2], [1], [NO_INTERVAL])
    feeds |= {name: np.array(values, np.int32) for name, values in zip(STATE_INPUTS, places, strict=True)}
    for name, values in {**feeds, "table": table}.items():
        request.set_tensor(name, openvino.Tensor(values, shared_memory=True))
    (answer,) = request.infer().values()
    for token, decay in enumerate(DECAYS):
        written = feeds["value"][0, token].reshape(HEADS, SIZE, 1) * feeds["key"][0, token]
        state = state * np.exp(decay) + written
        expected = (state @ feeds["query"][0, token]).ravel()
        np.testing.assert_allclose(answer[0, token], expected, atol=1e-5, err_msg=f"decay {decay}")
    np.testing.assert_allclose(table[1], state, atol=1e-5)
    np.testing.assert_array_equal(table[0], other)


def test_other_openvino_is_named_where_it_creates_no_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_states, "paged_attention_transformation", lambda model: None)
    core = openvino.Core()
    core.add_extension(state_extensions())
    with pytest.raises(Exception, match=f"does not create {GATED}: install the version"):
        core.read_model(str(decaying_layer(tmp_path / "layer.onnx")))
