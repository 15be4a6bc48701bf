"""Tiny tables of tokens' vectors, as sentence-transformers and model2vec save them, generated from fixed seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer

from tests.tiny_encoders import make_tokenizer

SIZE = 24
PROMPTS = {"query": "find this: ", "document": ""}
MODEL2VEC: dict[str, dict[str, Any]] = {  # checkpoints of every form that model2vec saves
    "plain": {"kind": "wordpiece", "dtype": "float32", "config": {"normalize": True}},
    "half": {"kind": "bpe", "dtype": "float16", "config": {"normalize": False, "max_length": None}},
    "shared": {"kind": "unigram", "dtype": "int8", "rows": 40, "config": {"normalize": True, "max_length": 12}},
}


def make_static(folder: Path, length: int | None = None, **options: Any) -> Path:
    """Save a table with sentence-transformers. `length`: tokens at which its tokenizer cuts a text."""
    tokenizer: Tokenizer = make_tokenizer("wordpiece", type_ids=False).backend_tokenizer
    if length is not None:
        tokenizer.enable_truncation(length)
    rows = np.random.default_rng(0).normal(size=(tokenizer.get_vocab_size(), SIZE)).astype(np.float32)
    modules = [StaticEmbedding(tokenizer, embedding_weights=rows), Normalize()]
    SentenceTransformer(modules=modules, device="cpu", prompts=PROMPTS, **options).save_pretrained(str(folder))
    return folder


def make_model2vec(folder: Path, form: str) -> Path:
    """Write the files that model2vec 0.10 writes, in one of the forms of `MODEL2VEC`."""
    settings, random = MODEL2VEC[form], np.random.default_rng(1)
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer(settings["kind"], type_ids=False).backend_tokenizer
    length = settings["config"].get("max_length", 512)
    if length is not None:
        tokenizer.enable_truncation(length)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens, rows = tokenizer.get_vocab_size(), settings.get("rows")
    table = random.normal(size=(rows or tokens, SIZE))
    tensors = {"embeddings": np.rint(table * 40) if settings["dtype"] == "int8" else table}
    tensors["embeddings"] = tensors["embeddings"].astype(settings["dtype"])
    if rows is not None:
        tensors["mapping"] = random.integers(0, rows, tokens)
        tensors["weights"] = random.uniform(0.1, 2, tokens)
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "model2vec", "architectures": ["StaticModel"], "hidden_dim": SIZE, **settings["config"]}
    (folder / "config.json").write_text(json.dumps(config))
    paths = {".": "StaticEmbedding", **({"1_Normalize": "Normalize"} if config["normalize"] else {})}
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{name}"}
        for place, (path, name) in enumerate(paths.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder
