"""Attention of prompts over an int8 cache, in fp32, beside ONNX Runtime's own kernel over that cache."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from builder.common.memory import CONVERTED_COPIES
from builder.engines.optimise import prompt_attention
from builder.engines.optimise.prompt_attention import MIN_NEW_TOKENS, attend_prompts_in_fp32
from builder.graphs.onnx.operators import DOMAIN

HEADS, GROUP, SIZE, POSITIONS = 2, 3, 16, 160
PAST = 70
COUNTS = (40, 64)  # tokens of two rows of a first prompt, padded to the longer
Attributes = dict[str, float]


def test_prompts_attend_in_fp32_as_over_the_codes() -> None:
    _assert_same(MIN_NEW_TOKENS, {})


@pytest.mark.parametrize("attributes", [{"local_window_size": 24}, {"softcap": 2.0, "scale": 0.5}])
def test_prompts_keep_the_attention_of_the_model(attributes: Attributes) -> None:
    _assert_same(2 * MIN_NEW_TOKENS, attributes)


def test_prompts_keep_the_sinks_of_the_model() -> None:
    _assert_same(MIN_NEW_TOKENS, {}, sinks=True)


def test_prompts_of_packed_queries_attend_in_fp32() -> None:
    """Regression: attention that takes queries, keys and values as one tensor (GPT-2) stayed over the codes."""
    _assert_same(MIN_NEW_TOKENS, {}, is_packed=True)


def test_padded_first_prompts_attend_in_fp32() -> None:
    _assert_same(max(COUNTS), {}, past=0, counts=COUNTS)


def test_steps_run_the_kernel_over_the_codes() -> None:
    own, long = _run(_model({}), MIN_NEW_TOKENS - 1), _run(_in_fp32(_model({})), MIN_NEW_TOKENS - 1)
    for ours, theirs in zip(long, own, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_prompts_whose_copies_would_be_large_run_the_kernel_over_the_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    position = CONVERTED_COPIES * 4 * HEADS * SIZE
    monkeypatch.setattr(prompt_attention, "MAX_CONVERTED_BYTES", (MIN_NEW_TOKENS + PAST) * position - 1)
    own, long = _run(_model({}), MIN_NEW_TOKENS), _run(_in_fp32(_model({})), MIN_NEW_TOKENS)
    np.testing.assert_array_equal(long[0], own[0])
    monkeypatch.setattr(prompt_attention, "MAX_CONVERTED_BYTES", (MIN_NEW_TOKENS + PAST) * position)
    assert (_run(_in_fp32(_model({})), MIN_NEW_TOKENS)[0] != own[0]).any()


def test_session_opens_without_warnings(capfd: pytest.CaptureFixture[str]) -> None:
    """Regression: a server's log said twice a model that an implicit input name cannot be safely updated."""
    onnxruntime.InferenceSession(_in_fp32(_model({})).SerializeToString(), providers=["CPUExecutionProvider"])
    assert capfd.readouterr().err == ""


def _assert_same(
    new: int, attributes: Attributes, past: int = PAST, counts: tuple[int, ...] = (), **inputs: bool
) -> None:
    """Compare answers, computed otherwise, and both caches: written in place at the new positions, nowhere else."""
    answer, *caches = _run(_in_fp32(_model(attributes, **inputs)), new, past, counts)
    expected, *kernels = _run(_model(attributes, **inputs), new, past, counts)
    assert (answer != expected).any()
    for row, count in enumerate(counts or [new]):
        np.testing.assert_allclose(answer[row, :count], expected[row, :count], atol=2e-5)
        for cache, kernel, before in zip(caches, kernels, _caches(len(answer)), strict=True):
            written, end = cache[row, :, past : past + count], past + new
            differences = np.abs(written.astype(int) - kernel[row, :, past : past + count])
            assert differences.max() <= 1  # halfway between two codes, either is right
            assert differences.mean() < 1e-3
            assert (written != before[row, :, past : past + count]).mean() > 0.9
            np.testing.assert_array_equal(cache[row, :, :past], before[row, :, :past])
            np.testing.assert_array_equal(cache[row, :, end:], before[row, :, end:])


def _in_fp32(model: onnx.ModelProto) -> onnx.ModelProto:
    attend_prompts_in_fp32(model)
    onnx.checker.check_model(model)
    return model


def _caches(rows: int) -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [generator.integers(-127, 128, (rows, HEADS, POSITIONS, SIZE)).astype(np.int8) for _ in range(2)]


def _run(
    model: onnx.ModelProto, new: int, past: int = PAST, counts: tuple[int, ...] = ()
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the answer, and keys and values, which the session has as inputs and outputs in one place.

    `counts`: tokens of each row of a first prompt, padded to `new`; else there is one row after `past` tokens.
    """
    generator = np.random.default_rng(0)
    width, rows = HEADS * SIZE, len(counts or [new])
    feeds = {
        "input_ids": np.zeros((rows, new), np.int64),
        "query": generator.normal(size=(rows, new, GROUP * width)).astype(np.float32),
        "key": generator.normal(size=(rows, new, width)).astype(np.float32),
        "value": generator.normal(size=(rows, new, width)).astype(np.float32),
        "seqlens_k": past - 1 + np.array(counts or [new], np.int32),
        "total_sequence_length": np.array([past + new], np.int32),
    }
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    if "key" not in names:
        feeds["query"] = np.concatenate([feeds.pop(name) for name in ("query", "key", "value")], axis=2)
    binding = session.io_binding()
    for name in names & feeds.keys():
        binding.bind_cpu_input(name, feeds[name])
    keys, values = _caches(rows)
    for kind, cache in (("key", keys), ("value", values)):
        binding.bind_input(f"past_{kind}_0", "cpu", 0, np.int8, cache.shape, cache.ctypes.data)
        binding.bind_output(f"present_{kind}_0", "cpu", 0, np.int8, cache.shape, cache.ctypes.data)
    binding.bind_output("answer")
    session.run_with_iobinding(binding)
    return binding.get_outputs()[-1].numpy(), keys, values


def _model(attributes: Attributes, sinks: bool = False, is_packed: bool = False) -> onnx.ModelProto:
    """Return a graph of one attention over an int8 cache, each of whose channels has a scale of its own.

    `is_packed`: queries, keys and values are columns of one input.
    """
    generator = np.random.default_rng(2)
    width = HEADS * SIZE
    constants = {f"{kind}_scales": generator.uniform(0.01, 0.05, width).astype(np.float32) for kind in ("key", "value")}
    taken = ("query",) if is_packed else ("query", "key", "value")
    inputs = [*taken, *[""] * (3 - len(taken)), "past_key_0", "past_value_0", "seqlens_k", "total_sequence_length"]
    inputs += ["", "", "", "", "sinks" if sinks else "", *constants]
    if sinks:
        constants["sinks"] = generator.normal(size=GROUP * HEADS).astype(np.float32)
    node = helper.make_node(
        "GroupQueryAttention", inputs, ["answer", "present_key_0", "present_value_0"], "attention", domain=DOMAIN,
        num_heads=HEADS * GROUP, kv_num_heads=HEADS, k_quant_type="PER_CHANNEL", v_quant_type="PER_CHANNEL",
        kv_cache_bit_width=8, **attributes,
    )  # fmt: skip
    cache = (TensorProto.INT8, ["rows", HEADS, POSITIONS, SIZE])
    shapes = {
        "input_ids": (TensorProto.INT64, ["rows", "new"]),
        "query": (TensorProto.FLOAT, ["rows", "new", GROUP * width]),
        "key": (TensorProto.FLOAT, ["rows", "new", width]),
        "value": (TensorProto.FLOAT, ["rows", "new", width]),
        "past_key_0": cache,
        "past_value_0": cache,
        "seqlens_k": (TensorProto.INT32, ["rows"]),
        "total_sequence_length": (TensorProto.INT32, [1]),
    }
    outputs = {"answer": shapes["query"], "present_key_0": cache, "present_value_0": cache}
    if is_packed:
        del shapes["key"], shapes["value"]
        shapes["query"] = (TensorProto.FLOAT, ["rows", "new", (GROUP + 2) * width])
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, *shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info(name, *shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(values, name) for name, values in constants.items()],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, ir_version=9, opset_imports=opsets)
