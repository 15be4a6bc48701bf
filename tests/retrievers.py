"""Tiny retrieval models, generated from fixed seeds: one with the heads of BGE-M3, and an asymmetric sparse encoder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SparseEncoder
from sentence_transformers.sparse_encoder.modules import Router, SparseStaticEmbedding, SpladePooling, Transformer
from transformers import AutoModel, AutoTokenizer

from tests.tiny_encoders import make_checkpoint

M3_PARTS = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))


def make_hybrid(folder: Path) -> Path:
    """Save a tiny XLM-RoBERTa into `folder` with the files of BGE-M3, whose vectors of tokens have 24 numbers."""
    make_checkpoint(folder, "xlm-roberta", "feature-extraction")
    types = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(M3_PARTS)
    ]
    (folder / "modules.json").write_text(json.dumps(types))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.sep_token
    tokenizer.save_pretrained(folder)
    torch.manual_seed(4)
    for name, size in (("sparse_linear", 1), ("colbert_linear", 24)):
        save_file(torch.nn.Linear(32, size).state_dict(), folder / f"{name}.safetensors")
    return folder


def hybrid_outputs(folder: Path, text: str, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a text's embedding, the weights of the vocabulary by scatter, and the vectors of its tokens.

    As M3Embedder of FlagEmbedding computes them (inference/embedder/encoder_only/m3.py, 1.4.2).
    """
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    sparse, colbert = (load_file(folder / f"{name}_linear.safetensors") for name in ("sparse", "colbert"))
    encoded = tokenizer(text, return_tensors="pt", truncation=True, max_length=longest)
    with torch.no_grad():
        (hidden,) = model(**encoded).last_hidden_state
    weights = torch.zeros(len(tokenizer)).scatter_reduce(
        0, encoded["input_ids"][0], torch.relu(hidden @ sparse["weight"][0] + sparse["bias"]), "amax"
    )
    weights[[tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id]] = 0
    vectors = hidden[1:] @ colbert["weight"].T + colbert["bias"]
    return (
        (hidden[0] / hidden[0].norm()).numpy(),
        weights.numpy(),
        (vectors / vectors.norm(dim=-1, keepdim=True)).numpy(),
    )


def make_router(folder: Path) -> Path:
    """Save a Router as the library does, with the layout of opensearch-neural-sparse-encoding-doc-v3."""
    plain = make_checkpoint(folder.with_name(f"{folder.name}-plain"), "bert", "fill-mask")
    documents = Transformer(str(plain), transformer_task="fill-mask")
    torch.manual_seed(0)
    queries = SparseStaticEmbedding(documents.tokenizer, torch.rand(len(documents.tokenizer.get_vocab())), frozen=True)
    routes = Router.for_query_document([queries], [documents, SpladePooling("max", "log1p_relu")])
    SparseEncoder(modules=[routes], device="cpu").save_pretrained(str(folder))
    return folder
