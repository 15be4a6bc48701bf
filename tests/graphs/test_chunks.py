"""Attention in chunks (Llama 4): a token sees those of its chunk up to itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from builder.building.verify.emitted import generate
from builder.building.verify.generation import generate_with, geometry_of
from builder.building.verify.long_rows import ask_long_row, refuse_wrong_long_row
from builder.common.errors import ExportError, SpecError, VerificationError
from builder.engines.cuda.decoding import decoder_for_cuda
from builder.engines.decoding import opened
from builder.engines.openvino.lowering import page_attention
from builder.graphs.export.decoder import export_decoder
from builder.runtime.contract import Session
from builder.runtime.generation.executors.onnxruntime import InProcess
from tests.decoders import make_decoder
from tests.exported_decoders import ExportedDecoder, exported_decoder
from tests.tiny_encoders import VOCABULARY

CHUNK = 16
LENGTHS = (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 2 * CHUNK, 9, 5)


@pytest.fixture(scope="module")
def exported(module_folder: Callable[[str], Path]) -> ExportedDecoder:
    return exported_decoder("llama4_text", module_folder("llama4"))


@pytest.mark.parametrize("piece", [7, CHUNK, 20])
def test_tokens_equal_generate_at_any_place_in_a_chunk(piece: int, exported: ExportedDecoder) -> None:
    """Rows join and leave at different places in their chunks, and come in pieces that cross the edges of chunks."""
    prompts = [np.random.default_rng(seed).integers(5, VOCABULARY, size).tolist() for seed, size in enumerate(LENGTHS)]
    expected = []
    for prompt in prompts:
        row = generate_with(exported.model, prompt, max_new_tokens=40, do_sample=False, pad_token_id=0)[0]
        expected.append(row[len(prompt) :].tolist())
    executor = exported.executor(4)
    assert generate(executor, prompts, 40, prefill_tokens=piece) == expected
    assert [generate(executor, [prompt], 40)[0] for prompt in prompts] == expected
    assert len({token for text in expected for token in text}) > 20, "not one token repeated"


def test_graph_contains_chunks_scales_and_sparse_experts(exported: ExportedDecoder) -> None:
    refuse_wrong_long_row(ask_long_row(exported.model, 128), exported.executor(1))
    for without in ({"attention_chunk_size": 128}, {"attn_temperature_tuning": False}, {"no_rope_layers": [1, 1, 1]}):
        with pytest.raises(VerificationError, match="differ from PyTorch's"):
            refuse_wrong_long_row(ask_long_row(make_decoder("llama4_text", **without), 128), exported.executor(1))
    assert exported.graph.operators["MoE"] == 2


def test_several_experts_of_a_token_equal_pytorchs(tmp_path: Path) -> None:
    model = make_decoder("llama4_text", num_experts_per_tok=2, use_qk_norm=False)
    result = export_decoder(model, tmp_path, 64)
    executor = InProcess(result.graph.path, geometry_of(result.caches, 1, 64, VOCABULARY), Session(threads=1))
    refuse_wrong_long_row(ask_long_row(model, 64), executor)


def test_rows_of_one_chunk_need_no_mask(tmp_path: Path) -> None:
    """They are causal, and served by engines that attend to whole texts alone."""
    model = make_decoder("llama4_text", attention_chunk_size=64)
    result = export_decoder(model, tmp_path, 64)
    executor = opened(page_attention(result.graph, tmp_path), 1)(geometry_of(result.caches, 1, 64, VOCABULARY))
    refuse_wrong_long_row(ask_long_row(model, 64), executor)


def test_engines_without_a_bias_refuse_chunks_by_name(exported: ExportedDecoder, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"chunks.* --max-length of one chunk at most"):
        page_attention(exported.graph, tmp_path)
    with pytest.raises(SpecError, match="chunks shorter than --max-length"):
        decoder_for_cuda(exported.fused, "fp16", "26.08", True, tmp_path)


def test_chunks_longer_than_the_keys_that_openvino_looks_at_are_refused(tmp_path: Path) -> None:
    """A bias that is zero at first would pass for one without effect."""
    result = export_decoder(make_decoder("llama4_text", attention_chunk_size=100), tmp_path, 128)
    with pytest.raises(ExportError, match="attention in chunks"):
        page_attention(result.graph, tmp_path)


def test_model_is_unchanged_after_its_export(exported: ExportedDecoder) -> None:
    """Experts are given what transformers says of those of other architectures, and lose it again."""
    experts = type(exported.model.model.layers[1].feed_forward.experts)
    assert not hasattr(experts, "has_gate")
    with torch.no_grad():
        assert exported.model(input_ids=torch.tensor([[5, 6, 7]])).logits.isfinite().all()
