"""Sparse embeddings as SPLADE makes them: a masked language model's logits, max-pooled after log(1 + relu).

Sources: https://arxiv.org/abs/2109.10086; sentence-transformers, sparse_encoder/models/SpladePooling.py.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.distances import PairedNumbers
from builder.checkpoints.rankers import Ranker, embedding_ranker
from builder.checkpoints.sentence_transformers.kinds import SPARSE_ENCODER
from builder.checkpoints.sentence_transformers.modules import SpladePooling
from builder.checkpoints.sentence_transformers.router import Routes
from builder.checkpoints.tasks.base import Answer, Sample, TaskGraph, cosine
from builder.checkpoints.tasks.feature_extraction import FeatureExtraction, prompted
from builder.checkpoints.tokenizer import vocabulary_difference
from builder.checkpoints.tokenizer_limits import panics_refused
from builder.common.errors import CheckpointError
from builder.runtime.encoder.tasks.sparse_embedding import INPUT_TYPE, INPUT_TYPES, QUERY_WEIGHTS

NO_LIMIT = 10**6  # tokens; a tokenizer without a limit has VERY_LARGE_INTEGER


class SpladeGraph(TaskGraph):
    """Weights (batch, vocabulary), none of them below 0; those of padding are 0."""

    def __init__(self, model: PreTrainedModel, inputs: Sequence[str], outputs: Sequence[str], activation: str) -> None:
        super().__init__(model, inputs, outputs)
        self.logarithms = 2 if activation == "log1p_relu" else 1

    def select(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        weights = torch.relu(self.model(**tensors).logits)
        for _ in range(self.logarithms):
            weights = torch.log1p(weights)
        return ((weights * tensors["attention_mask"].unsqueeze(-1).to(weights.dtype)).amax(dim=1),)


class SparseEmbedding(FeatureExtraction):
    name = "sparse-embedding"
    has_late_chunking = False
    takes_adapters = False
    head = "fill-mask"
    precedence = 2
    per_token = False
    graph_outputs = ("weights",)

    def claims(self, config: PreTrainedConfig, saved_by: str | None) -> bool:
        return saved_by == SPARSE_ENCODER

    def parameters(self, checkpoint: Checkpoint) -> dict[str, Any]:
        if checkpoint.pooling is not None:
            raise CheckpointError(
                "--pooling is for dense embeddings; sparse ones take the largest weight of each token"
            )
        sentence = checkpoint.sentence
        own: dict[str, Any] = {"max_active_dims": sentence.max_active_dims if sentence else None}
        if sentence is not None and sentence.routes is not None:
            limit = _table(checkpoint, sentence.routes).max_seq_length
            length = limit if limit < NO_LIMIT else checkpoint.max_length
            own["routes"] = {"default": sentence.routes.default, "query_length": length}
        return {**super().parameters(checkpoint), **own}

    def files(self, checkpoint: Checkpoint) -> dict[str, bytes]:
        sentence, file = checkpoint.sentence, io.BytesIO()
        if sentence is None or sentence.routes is None:
            return {}
        table = _table(checkpoint, sentence.routes)
        np.save(file, table.weight.detach().to(torch.float32).numpy())
        return {QUERY_WEIGHTS: file.getvalue()}

    def samples_for(self, checkpoint: Checkpoint) -> tuple[Sample, ...]:
        """Return each text as a query and as a document if these are read in different ways."""
        if checkpoint.sentence is None or checkpoint.sentence.routes is None:
            return self.samples
        return tuple({**sample, INPUT_TYPE.name: kind} for sample in self.samples for kind in INPUT_TYPES)

    def graph(self, checkpoint: Checkpoint, inputs: Sequence[str]) -> TaskGraph:
        return SpladeGraph(checkpoint.model, inputs, self.graph_outputs, _pooling(checkpoint).activation)

    def reference(self, checkpoint: Checkpoint, sample: Sample) -> Answer:
        """Return the answer of sentence-transformers' modules to one text alone, without padding."""
        sentence = checkpoint.sentence
        routes = sentence.routes if sentence else None
        if routes and sample.get(INPUT_TYPE.name, routes.default) == INPUT_TYPES[0]:
            module: Any = _table(checkpoint, routes)
            features = module.preprocess([_prompted(checkpoint, sample)])
        else:
            module = _library("modules").SpladePooling("max", _pooling(checkpoint).activation)
            features = checkpoint.tokenizer(_prompted(checkpoint, sample), return_tensors="pt")
            with torch.no_grad():
                features = {**features, "token_embeddings": checkpoint.model(**features).logits}
        with torch.no_grad():
            weights = module.eval()(features)["sentence_embedding"]
        most = sentence.max_active_dims if sentence else None
        kept = _library("model").select_max_active_dims(weights, most)[0].numpy()
        tokens = np.flatnonzero(kept)
        return {"indices": tokens.tolist(), "values": kept[tokens].tolist()}

    def agreement(self, expected: Answer, actual: Answer) -> float:
        return cosine(*_dense(expected, actual))

    def ranking(self, expected: Sequence[Answer], actual: Sequence[Answer]) -> dict[str, float]:
        vectors = [{"embedding": vector} for vector in _dense(*expected, *actual)]
        return super().ranking(vectors[: len(expected)], vectors[len(expected) :])

    def numbers(self, expected: Answer, actual: Answer) -> Mapping[str, PairedNumbers]:
        first, second = _dense(expected, actual)
        either = (first != 0) | (second != 0)
        return {"the weight of a token": PairedNumbers(first[either], second[either])}

    def difference(self, expected: Answer, actual: Answer) -> tuple[float, str]:
        """Compare the weights: a token that only one of two answers has may weigh next to nothing."""
        first, second = _dense(expected, actual)
        errors = np.abs(first - second) / np.maximum(1, first)
        token = int(errors.argmax())
        return float(errors[token]), f"answer.values of token {token}"

    def score(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, float]:
        return super().score(samples, [{"embedding": vector} for vector in _dense(*answers)])

    def ranker(self, checkpoint: Checkpoint) -> Ranker | None:
        sentence = checkpoint.sentence
        similarity = (sentence.similarity if sentence else None) or "dot"
        vectors = partial(token_weights, vocabulary=checkpoint.config.vocab_size)
        ranker = embedding_ranker(sentence.prompts if sentence else {}, similarity, vectors)
        if sentence is None or sentence.routes is None:
            return ranker
        query, document = ({INPUT_TYPE.name: kind} for kind in INPUT_TYPES)
        return replace(ranker, query={**ranker.query, **query}, document={**ranker.document, **document})


def token_weights(answers: Sequence[Answer], vocabulary: int) -> torch.Tensor:
    """Return the weights of answers as a sparse tensor, float32 (answers, vocabulary)."""
    tokens, weights = ([np.asarray(answer[key]) for answer in answers] for key in ("indices", "values"))
    rows = np.repeat(np.arange(len(answers)), [len(indices) for indices in tokens])
    columns, values = np.concatenate(tokens).astype(np.int64), np.concatenate(weights).astype(np.float32)
    used = columns >= 0  # others fill rows of a batch
    places = torch.from_numpy(np.stack([rows[used], columns[used]]))
    return torch.sparse_coo_tensor(
        places, torch.from_numpy(values[used]), (len(answers), vocabulary), is_coalesced=True
    )


def _pooling(checkpoint: Checkpoint) -> SpladePooling:
    found = checkpoint.sentence.of(SpladePooling) if checkpoint.sentence else []
    return found[0] if found else SpladePooling()


def _prompted(checkpoint: Checkpoint, sample: Sample) -> str:
    """Return the text of a sample after the prompt called as its input type, if it has one and names no prompt."""
    kind, sentence = sample.get(INPUT_TYPE.name), checkpoint.sentence
    if kind is None or sentence is None or {"prompt_name", "prompt"} & set(sample):
        return prompted(checkpoint, sample)
    return sentence.prompts.get(kind, "") + str(sample["text_input"])


def _library(module: str) -> Any:
    """Return a module of sentence-transformers' sparse encoder, imported late as it takes seconds."""
    return importlib.import_module(f"sentence_transformers.sparse_encoder.{module}")


@lru_cache(maxsize=1)
def _load_table(folder: Path) -> Any:
    """Return the SparseStaticEmbedding in `folder`."""
    with panics_refused(folder.name):
        return _library("modules").SparseStaticEmbedding.load(str(folder), local_files_only=True)


def _table(checkpoint: Checkpoint, routes: Routes) -> Any:
    """Return the module of queries, whose tokenizer and vocabulary must be those of documents.

    Raises CheckpointError.
    """
    table = _load_table(routes.query)
    difference = vocabulary_difference(checkpoint.tokenizer, table.tokenizer)
    if difference is not None:
        raise CheckpointError(f"{checkpoint.source} reads queries with another tokenizer than documents: {difference}")
    if table.weight.ndim != 1 or len(table.weight) <= max(checkpoint.tokenizer.get_vocab().values()):
        raise CheckpointError(
            f"{routes.query.name} has weights of shape {tuple(table.weight.shape)}; expected one for each of the "
            f"{len(checkpoint.tokenizer)} tokens"
        )
    return table


def _dense(*answers: Answer) -> np.ndarray:
    """Return the weights of all tokens, (answers, tokens)."""
    vectors = np.zeros((len(answers), 1 + max([0, *(index for answer in answers for index in answer["indices"])])))
    for vector, answer in zip(vectors, answers, strict=True):
        indices, values = np.asarray(answer["indices"], int), np.asarray(answer["values"], float)
        vector[indices[indices >= 0]] = values[indices >= 0]
    return vectors


TASK = SparseEmbedding()
