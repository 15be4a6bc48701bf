"""Decoders whose last layers share keys and values with earlier ones: a cache only for the layers that own one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builder.building.pipeline import build
from builder.building.verify.emitted import generate
from builder.building.verify.generation import generate_with, geometry_of, make_reference, measure
from builder.building.verify.long_rows import ask_long_row, refuse_wrong_long_row
from builder.common.errors import ExportError, SpecError
from builder.engines.cuda.decoding import decoder_for_cuda
from builder.engines.decoding import opened
from builder.engines.openvino.lowering import page_attention
from builder.engines.optimise.cache_precision import quantise_cache
from builder.graphs.export.decoder import cache_shapes
from builder.graphs.onnx.graph import check_release
from builder.options import make_spec
from builder.runtime.contract import LayerShape
from builder.runtime.generation.executors.openvino import OpenVinoExecutor
from builder.runtime.generation.service import Service
from builder.serving.plan.machine import plan
from tests.decoders import make_decoder, make_decoder_checkpoint
from tests.exported_decoders import ExportedDecoder, exported_decoder
from tests.tiny_encoders import VOCABULARY

NONE = LayerShape(0, 0)
OWN = {  # what each layer caches; Gemma 4's global layers have larger heads
    "gemma3n_text": (LayerShape(2, 8), LayerShape(2, 8), NONE, NONE),
    "gemma4_text": (LayerShape(1, 8), LayerShape(1, 16), NONE, NONE),
}
NORMS = {"gemma3n_text": 42, "gemma4_text": 30}
OTHER_MEANS = {"gemma3n_text": 13, "gemma4_text": 0}  # of sparse activations, and of magnitudes between layers
LENGTHS = (1, 2, 40, 17, 3, 30, 9, 5)  # windows are 16


@pytest.fixture(scope="module", params=OWN)
def exported(request: pytest.FixtureRequest, module_folder: Callable[[str], Path]) -> ExportedDecoder:
    return exported_decoder(request.param, module_folder(request.param))


def test_layers_that_share_have_no_cache(exported: ExportedDecoder) -> None:
    assert exported.layers == OWN[exported.model.config.model_type]
    assert {name for name in exported.graph.inputs if name.startswith("past_")} == {
        f"past_{kind}_{layer}" for kind in ("key", "value") for layer in (0, 1)
    }
    assert exported.fused.operators["GroupQueryAttention"] == 4
    assert len(exported.executor(2).arena) == 4


def test_norms_with_and_without_a_weight_are_one_operator(exported: ExportedDecoder) -> None:
    """Regression: they have a power of -0.5, and ran as six operators each."""
    name, operators = exported.model.config.model_type, exported.fused.operators
    assert operators["SimplifiedLayerNormalization"] == NORMS[name]
    assert operators["ReduceMean"] == OTHER_MEANS[name]


def test_tokens_equal_generate_alone_and_in_batches(exported: ExportedDecoder) -> None:
    """Eight prompts of unequal lengths join and leave four slots, and come in pieces of 16 tokens."""
    prompts = [np.random.default_rng(seed).integers(5, VOCABULARY, size).tolist() for seed, size in enumerate(LENGTHS)]
    expected = []
    for prompt in prompts:
        row = generate_with(exported.model, prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)[0]
        expected.append(row[len(prompt) :].tolist())
    executor = exported.executor(4)
    assert generate(executor, prompts, 24, prefill_tokens=16) == expected
    assert [generate(executor, [prompt], 24)[0] for prompt in prompts] == expected
    assert len({token for text in expected for token in text}) > 20, "not one token repeated"


@pytest.mark.parametrize(("cache", "error"), [("float32", 1e-4), ("float16", 0.1), ("uint8", 1.0)])
def test_openvino_reads_and_writes_the_cache_of_the_owner(
    exported: ExportedDecoder, cache: Any, error: float, tmp_path: Path
) -> None:
    """Its operator writes what it reads: the same keys and values once more, which round to the same numbers."""
    graph = page_attention(exported.graph, tmp_path)
    executor = opened(graph, 1)(geometry_of(exported.layers, 1, 128, VOCABULARY, cache))
    assert isinstance(executor, OpenVinoExecutor)
    assert len(executor.caches) == 4
    if cache == "float32":
        refuse_wrong_long_row(ask_long_row(exported.model, 128), executor)
    rows = [np.random.default_rng(seed).integers(5, VOCABULARY, size).tolist() for seed, size in enumerate((40, 25))]
    agreement = measure(opened(graph, 1), exported.layers, VOCABULARY, make_reference(exported.model, rows), cache)
    assert agreement.error < error


def test_older_releases_gpus_and_int8_are_refused(exported: ExportedDecoder, tmp_path: Path) -> None:
    check_release(exported.graph, "24.11", in_process=True)
    with pytest.raises(ExportError, match=r"over another layer's cache.* Build for Triton 24.11 or later"):
        check_release(exported.graph, "24.10", in_process=True)
    with pytest.raises(SpecError, match="its layers share keys and values"):
        decoder_for_cuda(exported.fused, "fp16", "26.08", True, tmp_path)
    with pytest.raises(SpecError, match="int8 cache: leave --cache out"):
        quantise_cache(exported.fused, {}, tmp_path)


@pytest.mark.slow
def test_build_and_plan_count_the_caches_of_owners_alone(tmp_path: Path) -> None:
    """A prompt that begins like an earlier one reuses its cache, as in other models."""
    checkpoint = make_decoder_checkpoint(tmp_path / "checkpoint", "gemma4_text")
    options = {"model": str(checkpoint), "name": "m", "output": tmp_path / "out", "engine": "onnxruntime"}
    report = build(make_spec(**options, precision="fp32", slots=2, max_length=64))
    assert report.attention == {"fused": 4, "layers": 4}
    assert report.memory is not None
    assert report.memory["cache"] == 2 * 64 * 2 * (8 + 16) * 4
    load = {"requests_per_s": 1, "tokens": 8, "answer_tokens": 8}
    (planned,), _ = plan([make_spec(**options, load=load, max_length=64)])
    assert any(f"64 tokens x {2 * (8 + 16)} keys and values" in line.formula for line in planned.lines)

    service, answers = Service(tmp_path / "out" / "m" / "1"), list[Any]()
    for _ in range(2):
        tensors = {"text_input": np.array(["The museum in Oslo opens at nine"], object)}
        service.submit(tensors, {"max_tokens": 20}, lambda answer, last: answers.append(answer))
        service.loop.run_until_idle()
    assert service.loop.stats.reused_tokens > 4
    assert answers[0]["text_output"] == answers[1]["text_output"]


def test_shapes_of_published_sizes_are_those_of_their_owners() -> None:
    """Gemma 3n E2B has 20 caches for 30 layers, of which the last ten share those of the last of their kind."""
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    model = make_decoder(
        "gemma3n_text",
        num_hidden_layers=30,
        layer_types=kinds * 6,
        num_kv_shared_layers=10,
        activation_sparsity_pattern=[0.95] * 10 + [0.0] * 20,
    )
    assert cache_shapes(model) == (LayerShape(2, 8),) * 20 + (NONE,) * 10
