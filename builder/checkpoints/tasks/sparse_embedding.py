"""Sparse embeddings as SPLADE makes them: a masked language model's logits, max-pooled after log(1 + relu).

Sources: https://arxiv.org/abs/2109.10086; sentence-transformers, sparse_encoder/models/SpladePooling.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.distances import PairedNumbers
from builder.checkpoints.sentence_transformers.kinds import SPARSE_ENCODER
from builder.checkpoints.tasks.base import Answer, Sample, TaskGraph, cosine
from builder.checkpoints.tasks.feature_extraction import FeatureExtraction, prompted
from builder.common.errors import CheckpointError


class SpladeGraph(TaskGraph):
    """Weights (batch, vocabulary), none of them below 0; those of padding are 0."""

    def select(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        weights = torch.log1p(torch.relu(self.model(**tensors).logits))
        return ((weights * tensors["attention_mask"].unsqueeze(-1).to(weights.dtype)).amax(dim=1),)


class SparseEmbedding(FeatureExtraction):
    name = "sparse-embedding"
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
        return super().parameters(checkpoint)

    def graph(self, checkpoint: Checkpoint, inputs: Sequence[str]) -> TaskGraph:
        return SpladeGraph(checkpoint.model, inputs, self.graph_outputs)

    def reference(self, checkpoint: Checkpoint, sample: Sample) -> Answer:
        """Answer one text alone, without padding."""
        inputs = checkpoint.tokenizer(prompted(checkpoint, sample), return_tensors="pt")
        with torch.no_grad():
            logits = checkpoint.model(**inputs).logits[0]
        weights = np.log1p(np.maximum(logits.numpy(), 0)).max(axis=0)
        tokens = np.flatnonzero(weights)
        return {"indices": tokens.tolist(), "values": weights[tokens].tolist()}

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


def _dense(*answers: Answer) -> np.ndarray:
    """Return the weights of all tokens, (answers, tokens)."""
    vectors = np.zeros((len(answers), 1 + max([0, *(index for answer in answers for index in answer["indices"])])))
    for vector, answer in zip(vectors, answers, strict=True):
        indices, values = np.asarray(answer["indices"], int), np.asarray(answer["values"], float)
        vector[indices[indices >= 0]] = values[indices >= 0]
    return vectors


TASK = SparseEmbedding()
