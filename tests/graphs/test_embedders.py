"""Decoders whose features are an embedding: causal attention without a cache, equal to sentence-transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import processors
from transformers import AutoConfig, AutoModel

from builder.checkpoints.resolve import resolve
from builder.common.samples import TEXTS
from builder.engines import Infer, infer_with
from builder.engines.openvino import convert
from builder.engines.optimise.fusion import fuse
from builder.engines.plain_attention import spell_out_attention
from builder.graphs.export.encoder import export
from builder.graphs.onnx.graph import Graph
from builder.graphs.onnx.operators import ATTENTION, CACHED_ATTENTION
from builder.options import make_spec
from tests.decoders import DECODERS, SIZES
from tests.tiny_encoders import make_tokenizer

PROMPT = "Instruct: find the answer\nQuery: "
BATCHES = (["a fox"], [TEXTS[0], "Zürich – 東京 🚆", TEXTS[5]], [" ".join(TEXTS)[:400], "short"])
WINDOWED = {"use_bidirectional_attention": True}


def make_embedder(folder: Path, model_type: str, mode: str, **options: Any) -> Path:
    """Save a tiny decoder as sentence-transformers does; its tokenizer pads on the left and appends an end token."""
    tokenizer = make_tokenizer("bpe", type_ids=False)
    ends = {"single": "$A [SEP]", "pair": "$A [SEP] $B [SEP]", "special_tokens": [("[SEP]", 3)]}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(**ends)
    tokenizer.padding_side = "left"
    config = AutoConfig.for_model(model_type, **{**SIZES, **DECODERS[model_type].options, "vocab_size": 640, **options})
    torch.manual_seed(0)
    AutoModel.from_config(config).save_pretrained(folder / "transformer")
    tokenizer.save_pretrained(folder / "transformer")
    modules = [Transformer(str(folder / "transformer")), Pooling(config.hidden_size, mode), Normalize()]
    SentenceTransformer(modules=modules, prompts={"query": PROMPT}, device="cpu").save(str(folder / "embedder"))
    return folder / "embedder"


@pytest.mark.parametrize(
    ("model_type", "mode", "options", "operator"),
    [
        ("qwen3", "lasttoken", {}, CACHED_ATTENTION),
        ("llama", "lasttoken", {}, CACHED_ATTENTION),
        ("mistral", "lasttoken", {}, ATTENTION),
        ("qwen2", "mean", {"is_causal": False, "use_sliding_window": False}, ATTENTION),
        ("gemma3_text", "mean", WINDOWED, ATTENTION),
    ],
)
def test_decoder_embeds_like_sentence_transformers(
    model_type: str, mode: str, options: dict[str, Any], operator: str, tmp_path: Path
) -> None:
    """Alone, padded, long, Unicode and prompted texts; on ONNX Runtime, and spelled out on OpenVINO."""
    folder = make_embedder(tmp_path, model_type, mode, **options)
    checkpoint = resolve(make_spec(model=str(folder)))
    exported = export(checkpoint, tmp_path)
    assert exported.warning is None
    assert exported.graph.operators[operator] == exported.layers == 2
    plain = spell_out_attention(exported.graph, tmp_path)
    converted = convert(plain, tmp_path / "ir" / "model.xml", "fp32", half_weights=False)
    engines = [infer_with(graph, 1) for graph in (fuse(exported.graph, tmp_path), plain)] + [_exactly(converted)]
    library = SentenceTransformer(str(folder), device="cpu")
    checkpoint.tokenizer.padding_side = "right"
    for batch in BATCHES:
        for prompt in ("", PROMPT):
            expected = library.encode(batch, prompt=prompt)
            encoded = checkpoint.tokenizer([prompt + text for text in batch], padding=True, return_tensors="np")
            feeds = {name: encoded[name].astype(np.int64) for name in exported.graph.inputs}
            for engine in engines:
                cosines = (engine(feeds)["features"] * expected).sum(axis=-1)
                assert cosines.min() >= 0.999999


def _exactly(graph: Graph) -> Infer:
    """Run OpenVINO in fp32 on any CPU."""
    model = openvino.Core().compile_model(str(graph.path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda feeds: {name: model(feeds)[name] for name in graph.outputs}
