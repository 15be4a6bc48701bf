"""Embed texts sparsely: return the tokens of the vocabulary that matter to each text, with their weights.

A checkpoint can have a table with the weights of a query's tokens: queries are answered from it, without the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...contract import EncoderServing
from ...fields import Field, InputError, Tensors, any_text, choice
from .. import task
from ..text import TextEncoder
from .feature_extraction import Task as FeatureExtraction
from .feature_extraction import text_inputs

NONE = -1  # fills rows that have fewer tokens than another row of the request
QUERY_WEIGHTS = "query_weights.npy"  # in the version folder: float32 (vocabulary,)
INPUT_TYPE = Field("input_type", "TYPE_STRING", optional=True)
QUERY, INPUT_TYPES = "query", ("query", "document")


class Task(FeatureExtraction):
    def __init__(self, serving: EncoderServing, text: TextEncoder, folder: Path) -> None:
        super().__init__(serving, text, folder)
        self.routes: Mapping[str, Any] | None = self.parameters.get("routes")
        self.query_weights = np.load(folder / QUERY_WEIGHTS) if self.routes else np.zeros(0, np.float32)

    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (*text_inputs(parameters), *((INPUT_TYPE,) if parameters.get("routes") else ()))

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (Field("indices", "TYPE_INT32", (-1,)), Field("values", "TYPE_FP32", (-1,)))

    def read(self, tensors: Tensors) -> task.EncodingJob:
        job = super().read(tensors)
        if self.routes is not None:
            job.options["input_type"] = self._input_type(tensors, self.routes["default"])
        return job

    def _input_type(self, tensors: Tensors, default: str | None) -> str:
        if default is None and INPUT_TYPE.name not in tensors:
            raise InputError("this model reads queries and documents in different ways; send input_type")
        return choice(tensors, INPUT_TYPE.name, default or QUERY, INPUT_TYPES)

    def _prompt(self, tensors: Tensors) -> str:
        """Return the prompt called as the input_type if a request names one of these and no prompt.

        As encode_query and encode_document of sentence-transformers do (sparse_encoder/model.py, 6.2).
        """
        if self.parameters.get("routes") and INPUT_TYPE.name in tensors and "prompt_name" not in tensors:
            own = any_text(tensors, "prompt")
            return self.parameters["prompts"].get(self._input_type(tensors, None), "") if own is None else own
        return super()._prompt(tensors)

    def answer_without_engine(self, job: task.EncodingJob) -> dict[str, np.ndarray] | None:
        """Return the answer to queries: their tokens, each once and without special ones, and the tokens' weights."""
        if self.routes is None or job.options["input_type"] != QUERY:
            return None
        texts = [self._cut_query(job, row, ids) for row, ids in enumerate(self.text.ids_of(job.texts))]
        tokens = [np.unique(np.array(ids, np.int64)) for ids, _ in texts]
        answer = self._sparse([(row, self.query_weights[row]) for row in tokens])
        cut = np.array([[is_cut] for _, is_cut in texts])
        sizes = np.array([[len(ids)] for ids, _ in texts], np.int32)
        return {**answer, task.TRUNCATED.name: cut, task.PROMPT_TOKENS.name: sizes}

    def _cut_query(self, job: task.EncodingJob, row: int, ids: list[int]) -> tuple[list[int], bool]:
        """Return the tokens of a query, and whether they were cut. Raises InputError."""
        most: int = self.routes["query_length"] if self.routes else 0
        if len(ids) <= most:
            return ids, False
        if not job.truncate:
            raise InputError(
                f"row {row} has {len(ids)} tokens; the limit of a query of this model is {most}: {self.too_long}"
            )
        return ids[:most] if self.text.truncation_side == "right" else ids[-most:], True

    def answer(
        self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> dict[str, np.ndarray]:
        """Return indices in ascending order; rows with fewer than the longest end with -1 and the value 0."""
        reached = [np.flatnonzero(output["weights"] > 0) for output in outputs]
        return self._sparse([(tokens, output["weights"][tokens]) for tokens, output in zip(reached, outputs)])

    def _sparse(self, rows: "Sequence[tuple[np.ndarray, np.ndarray]]") -> dict[str, np.ndarray]:
        """Pad rows of tokens and their weights, the largest of them if the checkpoint keeps a number of these."""
        kept = [self._largest(tokens[weights != 0], weights[weights != 0]) for tokens, weights in rows]
        shape = len(kept), max([1, *(len(tokens) for tokens, _ in kept)])
        indices, values = np.full(shape, NONE, np.int32), np.zeros(shape, np.float32)
        for row, (tokens, weights) in enumerate(kept):
            indices[row, : len(tokens)], values[row, : len(tokens)] = tokens, weights
        return {"indices": indices, "values": values}

    def _largest(self, tokens: np.ndarray, weights: np.ndarray) -> "tuple[np.ndarray, np.ndarray]":
        most = self.parameters.get("max_active_dims")
        kept = np.sort(np.argsort(-np.abs(weights), kind="stable")[:most])
        return tokens[kept], weights[kept]
