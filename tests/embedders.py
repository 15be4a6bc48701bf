"""Tiny decoders that embed texts, generated from fixed seeds and saved by sentence-transformers."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from tokenizers import processors
from transformers import AutoConfig, AutoModel

from tests.decoders import DECODERS, SIZES
from tests.tiny_encoders import make_tokenizer

PROMPT = "Instruct: find the answer\nQuery: "


def make_embedder(folder: Path, model_type: str, mode: str, **options: Any) -> Path:
    """Save a tiny decoder as Qwen3-Embedding is: its tokenizer pads on the left and appends an end token."""
    tokenizer = make_tokenizer("bpe", type_ids=False)
    ends = {"single": "$A [SEP]", "pair": "$A [SEP] $B [SEP]", "special_tokens": [("[SEP]", 3)]}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(**ends)
    tokenizer.padding_side = "left"
    config = AutoConfig.for_model(model_type, **{**SIZES, **DECODERS[model_type].options, "vocab_size": 640, **options})
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as transformer:
        AutoModel.from_config(config).save_pretrained(transformer)
        tokenizer.save_pretrained(transformer)
        modules = [Transformer(transformer), Pooling(config.hidden_size, mode), Normalize()]
        SentenceTransformer(modules=modules, prompts={"query": PROMPT}, device="cpu").save(str(folder))
    return folder
