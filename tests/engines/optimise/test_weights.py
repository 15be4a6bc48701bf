"""Precisions of decoders: everything is quantised, tied weights once, and rows do not change each other's answers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import builder.options.build_spec
from builder.building.pipeline import build
from builder.building.verify.generation import DecoderReference, geometry_of, largest_values, make_reference, measure
from builder.common.errors import SpecError, VerificationError
from builder.engines.decoding import opened
from builder.engines.optimise import prompt_attention
from builder.engines.optimise.cache_precision import quantise_cache
from builder.engines.optimise.fusion import fuse
from builder.engines.optimise.weights import quantise_weights
from builder.graphs.export.decoder import export_decoder
from builder.graphs.onnx.graph import Graph, check_release, operator_needs, save_graph
from builder.graphs.onnx.nodes import add_constant
from builder.options import WeightOptions, make_spec
from builder.runtime.contract import LayerShape, Session
from builder.runtime.generation.executors.onnxruntime import InProcess
from tests.decoders import make_decoder, make_decoder_checkpoint
from tests.graphs.test_decoders import prompts
from tests.tiny_encoders import VOCABULARY

OPTIONS = WeightOptions(32, True)
PRECISIONS = ("int8", "int8-weights", "int4-weights")


Fused = tuple[Graph, tuple[LayerShape, ...], DecoderReference]


@pytest.fixture(scope="module")
def fused(module_folder: Callable[[str], Path]) -> Callable[[str], Fused]:
    """Return the graph of a tiny decoder, its cache, and PyTorch's reference; created at the first use of each."""

    @functools.cache
    def export_once(model_type: str) -> Fused:
        model, folder = make_decoder(model_type), module_folder(model_type)
        exported = export_decoder(model, folder, 128)
        return fuse(exported.graph, folder), exported.caches, make_reference(model, prompts())

    return export_once


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("model_type", "products"), [("gpt2", 9), ("llama", 9), ("opt", 9)])
def test_quantise_weights_covers_every_product_and_the_table(
    model_type: str, products: int, precision: str, fused: Callable[[str], Fused], tmp_path: Path
) -> None:
    graph, caches, reference = fused(model_type)
    quantised = quantise_weights(graph, precision, OPTIONS, tmp_path)
    assert (quantised.matmuls, quantised.embeddings) == (products, 1)
    operators = quantised.graph.operators
    assert operators["MatMulIntegerToFloat"] + operators["MatMulNBits"] == products
    assert operators["MatMul"] == operators["Gemm"] == 0
    assert quantised.graph.size < 0.6 * graph.size
    agreement = measure(opened(quantised.graph, 1), caches, VOCABULARY, reference)
    assert agreement.error > 1e-4, "quantised weights are not fp32 under another name"
    assert agreement.mean > (0.3 if precision == "int4-weights" else 0.85)  # random weights: nearly flat logits


def test_tied_weights_are_stored_once(fused: Callable[[str], Fused], tmp_path: Path) -> None:
    graph, _, _ = fused("gpt2")
    for precision in PRECISIONS:
        quantised = quantise_weights(graph, precision, OPTIONS, tmp_path).graph
        tables = [
            t for t in onnx.load(str(quantised.path)).graph.initializer if VOCABULARY in t.dims and len(t.dims) > 1
        ]
        assert sorted(tuple(t.dims) for t in tables) == [(VOCABULARY, 1), (VOCABULARY, 32)]


@pytest.mark.parametrize("options", [WeightOptions(16, True), WeightOptions(32, False), WeightOptions(128, True)])
def test_quantise_weights_stores_blocks_and_zero_points(
    options: WeightOptions, fused: Callable[[str], Fused], tmp_path: Path
) -> None:
    graph, caches, reference = fused("llama")
    quantised = quantise_weights(graph, "int4-weights", options, tmp_path).graph
    nodes = [node for node in onnx.load(str(quantised.path)).graph.node if node.op_type == "MatMulNBits"]
    for node in nodes:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        assert (attributes["block_size"], attributes["bits"]) == (options.block_size, 4)
        assert (len(node.input) > 3 and node.input[3] != "") != options.symmetric
    assert measure(opened(quantised, 1), caches, VOCABULARY, reference).mean > 0.3


@pytest.mark.parametrize("precision", ["int8", "int8-weights"])
def test_answer_of_a_row_is_independent_of_its_batch(
    precision: str, fused: Callable[[str], Fused], tmp_path: Path
) -> None:
    """Logits are bit-identical alone and beside rows with activations a thousand times larger."""
    graph, caches, _ = fused("llama")
    quantised = quantise_weights(graph, precision, OPTIONS, tmp_path).graph
    executor = InProcess(quantised.path, geometry_of(caches, 4, 32, VOCABULARY), Session(threads=1))
    alone = executor.run(0, np.array([[7]]), np.zeros(1, np.int64)).copy()
    executor.arena["value_0"][1:] = 1000.0
    together = executor.run(0, np.array([[7], [8], [9], [10]]), np.array([0, 9, 9, 9]))
    np.testing.assert_array_equal(alone[0], together[0])


@pytest.mark.parametrize("model_type", ["qwen3", "gpt_oss"])
def test_int8_cache_answers_like_fp32(model_type: str, fused: Callable[[str], Fused], tmp_path: Path) -> None:
    """Regression: a report counted the attention of each layer twice, once for each branch."""
    graph, caches, reference = fused(model_type)
    largest = largest_values(opened(graph, 1), caches, VOCABULARY, reference)
    small = quantise_cache(graph, largest, tmp_path)
    assert small.operators["GroupQueryAttention"] == len(caches)
    agreement = measure(opened(small, 1), caches, VOCABULARY, reference, "int8")
    assert 1e-4 < agreement.error < 0.5
    assert agreement.mean > 0.9
    executor = InProcess(small.path, geometry_of(caches, 2, 32, VOCABULARY, "int8"), Session(threads=1))
    assert {tensor.dtype for tensor in executor.arena.values()} == {np.dtype(np.int8)}
    executor.run(0, np.array([[5, 6, 7]]), np.zeros(1, np.int64))
    assert np.abs(executor.arena["key_0"][0, :, :3]).max() > 20, "the range is used"


def test_weights_that_a_release_cannot_load_are_refused(fused: Callable[[str], Fused]) -> None:
    for model_type, need, release in (
        ("llama", "GroupQueryAttention on CPU", "24.12"),
        ("gemma2", "GroupQueryAttention with softcap", "24.12"),
        ("bloom", "GroupQueryAttention with attention_bias", "25.05"),
        ("flint", "GroupQueryAttention with head_sink", "25.08"),
    ):
        graph, _, _ = fused(model_type)
        assert need in operator_needs(graph)
        with pytest.raises(Exception, match=rf"uses {operator_needs(graph)[0]}.*Build for Triton {release} or later"):
            check_release(graph, "24.04")
        check_release(graph, "25.10")


def test_weights_pass_the_quality_gate_and_auto_selects(tmp_path: Path) -> None:
    checkpoint = str(make_decoder_checkpoint(tmp_path / "checkpoint", "llama"))
    options: dict[str, Any] = {"model": checkpoint, "name": "m", "output": tmp_path / "out", "slots": 2}
    with pytest.raises(VerificationError, match=r"int4-weights has a next-token agreement of 0.[0-9]+ against PyTorch"):
        build(make_spec(**options, precision="int4-weights", quality=0.999))
    assert not (tmp_path / "out").exists()
    report = build(make_spec(**options, precision="auto", quality=0.999, perplexity=1.001))
    assert report.choice is not None
    assert report.choice.startswith(f"chose {report.chosen}: ")
    assert "of PyTorch's perplexity" in report.choice
    assert len(report.variants) == 5
    assert {measured.name for measured in report.variants if measured.quality is None} == _slower(report.choice)
    assert report.memory is not None
    assert report.memory["cache"] == 2 * 2 * 2 * 8 * 4 * 2 * 256


def test_build_refuses_an_int8_cache_that_prompts_read_wrongly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: no call of the verification had the tokens from which on attention to codes is computed in fp32."""

    def wrong_scales(graph: onnx.GraphProto, name: str, values: np.ndarray) -> None:
        add_constant(graph, name, -values if name.endswith("of_values.repeated") else values)

    checkpoint = str(make_decoder_checkpoint(tmp_path / "checkpoint", "llama"))
    spec = make_spec(model=checkpoint, name="m", output=tmp_path / "out", slots=2, cache="int8", quality=0.9)
    with monkeypatch.context() as patch:
        patch.setattr(prompt_attention, "add_constant", wrong_scales)
        with pytest.raises(VerificationError, match="fp32, int8 cache has a next-token agreement of 0"):
            build(spec)
    assert build(spec).chosen == "fp32, int8 cache"


def _slower(choice: str) -> set[str]:
    """Return the precisions that a choice reports as slower, and therefore not verified."""
    _, _, rest = choice.partition("; slower: ")
    slower, _, _ = rest.partition("; ")  # the rest is about a busy machine
    return {one.split(" (")[0] for one in slower.split(", ") if one}


def test_cache_that_does_not_fit_is_refused_before_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = str(make_decoder_checkpoint(tmp_path / "checkpoint", "llama", num_hidden_layers=4))
    spec = make_spec(model=checkpoint, name="m", output=tmp_path / "out", slots=512)
    monkeypatch.setattr(builder.options.build_spec, "available_memory", lambda: 50_000_000)
    with pytest.raises(SpecError, match=r"the cache needs 0.1 GB \(512 slots of 256 tokens\) and 0.0 GB may be used"):
        build(spec)


def test_decoder_refuses_options_of_encoders(tmp_path: Path) -> None:
    checkpoint = str(make_decoder_checkpoint(tmp_path / "checkpoint", "llama"))
    with pytest.raises(SpecError, match="--truncate: a decoder does not have that; build without it"):
        build(make_spec(model=checkpoint, name="m", output=tmp_path / "out", truncate=True))
    with pytest.raises(SpecError, match="block holds 16, 32"):
        make_spec(model="x", block_size=17)
    with pytest.raises(SpecError, match="in-process executor"):
        make_spec(model="x", cache="int8", executor="bls")


def test_unquantised_product_fails_the_build(tmp_path: Path) -> None:
    """ONNX Runtime may fuse a scale and a product into FusedMatMul, which the quantiser, looking for MatMul, misses."""
    graph = fuse(export_decoder(make_decoder("llama"), tmp_path, 64).graph, tmp_path)
    model = onnx.load(str(graph.path))
    hidden = next(node for node in model.graph.node if node.op_type == "MatMul")
    hidden.op_type, hidden.domain = "FusedMatMul", "com.microsoft"
    changed = save_graph(model, tmp_path / "changed" / "model.onnx")
    with pytest.raises(VerificationError, match=f"not {re.escape(hidden.name)}; nothing was published"):
        quantise_weights(changed, "int8", WeightOptions(32, True), tmp_path)
