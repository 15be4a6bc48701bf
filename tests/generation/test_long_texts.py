"""Long texts of decoders without states: the tokens and logits of `model.generate` after 8,000 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from builder.building.verify.emitted import generate
from builder.building.verify.generation import generate_with, geometry_of
from builder.engines.decoding import opened
from builder.engines.openvino.lowering import page_attention
from builder.engines.optimise.fusion import fuse
from builder.graphs.export.decoder import DecoderExport, export_decoder
from builder.runtime.contract import LayerShape
from builder.runtime.generation.executors.base import Executor
from tests.decoders import make_decoder
from tests.tiny_encoders import VOCABULARY

LONG, COUNT, PIECE = 8000, 8, 450  # tokens
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
LATENT_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
CLASSES: dict[str, tuple[str, dict[str, Any], LayerShape]] = {  # windows and chunks end within pieces
    "sinks": ("gpt_oss", {**HEADS, "sliding_window": 300}, LayerShape(1, 8)),
    "latents, absorbed": ("youtu", LATENT_HEADS, LayerShape(1, 24)),
    "latents, expanded": ("deepseek_v3", {**LATENT_HEADS, "kv_lora_rank": 128, "v_head_dim": 8}, LayerShape(2, 24)),
    "experts, windows": ("mixtral", {**HEADS, "sliding_window": 300}, LayerShape(1, 16)),
    "chunks": (
        "llama4_text",
        {**HEADS, "attention_chunk_size": 300, "num_hidden_layers": 2, "no_rope_layers": [1, 0], "moe_layers": [1]},
        LayerShape(1, 8),
    ),
}
WITHOUT_OPENVINO = ("chunks",)


@pytest.mark.parametrize("name", CLASSES)
def test_tokens_equal_generate_after_thousands_of_tokens(name: str, tmp_path: Path) -> None:
    """The prompt comes in pieces, in transformers too: that takes half of its time."""
    model_type, options, layer = CLASSES[name]
    model = make_decoder(model_type, **options)
    result = export_decoder(model, tmp_path, LONG + COUNT)
    assert result.caches == (layer, layer)
    prompt = [int(token) for token in np.random.default_rng(0).integers(5, VOCABULARY, LONG)]
    settings = {"max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0, "prefill_chunk_size": PIECE}
    answer: Any = generate_with(model, prompt, **settings, output_logits=True, return_dict_in_generate=True)
    text, logits = answer.sequences[0, LONG:].tolist(), torch.cat(answer.logits).numpy()
    assert len(set(text)) > COUNT // 2, "not one token repeated"
    for executor in executors(result, tmp_path, name not in WITHOUT_OPENVINO):
        assert generate(executor, [prompt], COUNT, PIECE) == [text]
        np.testing.assert_allclose(logits_along(executor, [*prompt, *text[:-1]]), logits, atol=1e-3)


def executors(result: DecoderExport, folder: Path, on_openvino: bool) -> Iterator[Executor]:
    """Open the graph in ONNX Runtime and, where that has its attention, in OpenVINO."""
    geometry = geometry_of(result.caches, 1, LONG + COUNT, VOCABULARY)
    yield opened(fuse(result.graph, folder), 1)(geometry)
    if on_openvino:
        yield opened(page_attention(result.graph, folder), 1)(geometry)


def logits_along(executor: Executor, tokens: list[int]) -> np.ndarray:
    """Feed `tokens` in pieces; return the logits after each of the last `COUNT`, which are in one piece."""
    for past in range(0, len(tokens), PIECE):
        piece = np.array([tokens[past : past + PIECE]])
        last = np.arange(max(0, piece.size - COUNT), piece.size)
        logits = executor.run(0, piece, np.array([past]), last)
    return logits
