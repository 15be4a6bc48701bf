"""Embed texts in three ways by one call of the engine: a vector, weights of tokens, and a vector a token.

Computes what M3Embedder of FlagEmbedding does (inference/embedder/encoder_only/m3.py, 1.4.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...fields import Field
from .. import task
from ..token_vectors import padded, text_offsets, vector_outputs
from .feature_extraction import text_inputs
from .sparse_embedding import Task as SparseEmbedding


class Task(SparseEmbedding):
    offsets = True

    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return text_inputs(parameters)

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        dense = Field("embedding", "TYPE_FP32", (parameters["size"],))
        return (dense, *SparseEmbedding.outputs(parameters), *vector_outputs(parameters["vector_size"]))

    def answer(
        self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> dict[str, np.ndarray]:
        """Return the embeddings, the weights as of sparse embeddings, and the vectors without those of first tokens."""
        weights = [self._weights(row, output["weights"]) for row, output in zip(rows, outputs)]
        vectors = [
            (output["vectors"][1 : len(row.encoding)], text_offsets(row.encoding, job.options["prompt"])[1:])
            for row, output in zip(rows, outputs)
        ]
        return {
            "embedding": np.stack([output["features"] for output in outputs]),
            **self._sparse(weights),
            **padded(vectors, self.parameters["vector_size"]),
        }

    def _weights(self, row: task.Row, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a text, each once and without special ones, and the largest weight of each."""
        ids = np.array(row.encoding.ids, np.int64)
        tokens, places = np.unique(ids, return_inverse=True)
        largest = np.zeros(len(tokens), np.float32)
        np.maximum.at(largest, places, weights[: len(ids)])
        kept = ~np.isin(tokens, self.parameters["skipped"])
        return tokens[kept], largest[kept]
