"""Models that read images or audio too: their part for text answers as the whole model does, and is built alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from builder.building.pipeline import build
from builder.building.variants import timing
from builder.building.verify.emitted import generate
from builder.building.verify.generation import geometry_of
from builder.checkpoints.resolve import describe, resolve
from builder.checkpoints.text_part import other_inputs, text_part
from builder.common.errors import CheckpointError
from builder.engines.optimise.fusion import fuse
from builder.graphs.export.decoder import export_decoder
from builder.options import make_spec
from builder.runtime.contract import Session
from builder.runtime.generation.executors.onnxruntime import InProcess
from scripts.tiny_models import ROWS, load, make_checkpoint, tiny_config, tiny_model
from tests.tiny_encoders import VOCABULARY

HEAD = "MULTIMODAL_LM"
LENGTHS = (5, 40, 17, 3)  # windows are 16
NEW_TOKENS = 24


def greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    model.generation_config = GenerationConfig()
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, **settings)
    return [int(token) for token in tokens[0, len(prompt) :]]


@pytest.mark.parametrize(
    ("model_type", "text_type"),
    [
        ("gemma3", "gemma3_text"),
        pytest.param("gemma3n", "gemma3n_text", marks=pytest.mark.slow),
        pytest.param("gemma4", "gemma4_text", marks=pytest.mark.slow),
        ("llama4", "llama4_text"),
        ("mistral3", "mistral"),
        ("qwen2_5_vl", "qwen2_5_vl_text"),  # without a class for its output layer
        ("qwen3_vl", "qwen3_vl_text"),
    ],
)
def test_text_part_answers_as_the_whole_model_in_batches(model_type: str, text_type: str, tmp_path: Path) -> None:
    folder = make_checkpoint(HEAD, model_type, tmp_path / "checkpoint")
    checkpoint = resolve(make_spec(model=str(folder), name="model"))
    assert (checkpoint.task.name, checkpoint.model.config.model_type) == ("text-generation", text_type)
    result = export_decoder(checkpoint.model, tmp_path, 128)
    assert result.graph.operators["ScatterND"] == 0 or model_type == "gemma3n", "the angles of equal positions are one"
    graph = fuse(result.graph, tmp_path)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(5, VOCABULARY, length).tolist() for length in LENGTHS]
    executor = InProcess(graph.path, geometry_of(result.caches, 2, 128, ROWS), Session(threads=1))
    whole = load(HEAD, folder)
    assert generate(executor, prompts, NEW_TOKENS) == [greedy(whole, prompt) for prompt in prompts]


def test_build_serves_the_text_part_and_says_what_is_left_out(tmp_path: Path) -> None:
    folder = make_checkpoint(HEAD, "qwen3_vl", tmp_path / "checkpoint")
    spec = make_spec(
        model=str(folder), name="model", output=tmp_path / "repository", precision="fp32", max_length=64, slots=2
    )
    with ExitStack() as untimed:
        for name in ("pytorch_decoder_latencies", "decoder_latencies"):
            untimed.enter_context(patch.object(timing, name, lambda *_: {}))
        report = build(spec)
    assert report.attention == {"fused": 2, "layers": 2}
    assert any("image, video, which is left out" in warning for warning in report.warnings)
    written = json.loads((tmp_path / "repository" / "model" / "build.json").read_text("utf-8"))
    assert written["warnings"] == list(report.warnings)


def test_text_part_is_described_without_weights(tmp_path: Path) -> None:
    folder = make_checkpoint(HEAD, "gemma3", tmp_path / "checkpoint")
    checkpoint = describe(make_spec(model=str(folder), name="model").source)
    assert checkpoint.model.config.model_type == "gemma3_text"
    assert next(checkpoint.model.parameters()).is_meta
    assert not any("vision" in name for name, _ in checkpoint.model.named_parameters())


def test_text_part_has_the_output_layer_of_the_whole_model() -> None:
    """Aya Vision leaves out the scale that Cohere 2 alone multiplies its logits by."""
    model = tiny_model(HEAD, "aya_vision")
    part = text_part(model)
    ids = torch.tensor([[5, 9, 7]])
    with torch.no_grad():
        assert torch.allclose(part(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-6)
    assert part.config.logit_scale != 1


def _answers_otherwise(model: PreTrainedModel, tokens: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let the whole model alone answer a text with some `tokens` otherwise than its part for text."""

    def changed(module: torch.nn.Module, args: Any, options: dict[str, Any], output: Any) -> None:
        output.logits = output.logits + tokens(options["input_ids"]).any().float()

    model.register_forward_hook(changed, with_kwargs=True)


def test_text_part_is_compared_over_the_whole_vocabulary() -> None:
    """Regression: five small ids said nothing about the tokens after them."""
    model = tiny_model(HEAD, "qwen3_vl")
    _answers_otherwise(model, lambda ids: ids > VOCABULARY // 2)
    with pytest.raises(CheckpointError, match="answers a text otherwise than the whole model"):
        text_part(model)


def test_text_part_is_compared_without_the_tokens_of_images() -> None:
    model = tiny_model(HEAD, "qwen3_vl")
    _answers_otherwise(model, lambda ids: ids == model.config.image_token_id)
    for token in range(VOCABULARY // 2, VOCABULARY // 2 + 12):
        model.config.image_token_id = token
        assert text_part(model).config.model_type == "qwen3_vl_text"
    model.config.other_token_id = [[5], None]  # a damaged configuration
    assert text_part(model).config.model_type == "qwen3_vl_text"


@pytest.mark.parametrize(
    ("model_type", "message"),
    [
        ("blip-2", "Blip2ForConditionalGeneration does not answer a text alone"),
        ("kosmos-2.5", "the part for text of Kosmos2_5ForConditionalGeneration answers a text otherwise"),
    ],
)
def test_model_without_a_part_of_its_own_is_refused_by_name(model_type: str, message: str) -> None:
    """Regression: a part of Kosmos-2.5, which has an output layer already, ended in a traceback."""
    with pytest.raises(CheckpointError, match=message):
        text_part(tiny_model(HEAD, model_type))


def test_model_of_text_alone_reads_nothing_else() -> None:
    assert other_inputs(tiny_config("CAUSAL_LM", "llama")) == []
    assert other_inputs(tiny_config(HEAD, "gemma4")) == ["image", "video", "audio"]
