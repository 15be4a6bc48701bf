"""Score the relevance of documents to a query, with a cross-encoder that reads both together (arXiv:1901.04085)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...fields import Field, InputError, Tensors, choice, one_each, strings
from .. import task
from ..scores import FUNCTIONS


class Task(task.Task):
    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (
            Field("query", "TYPE_STRING"),
            Field("documents", "TYPE_STRING", (-1,)),
            Field("function_to_apply", "TYPE_STRING", optional=True),
        )

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (Field("score", "TYPE_FP32", (-1,)), Field("order", "TYPE_INT32", (-1,)))

    def read(self, tensors: Tensors) -> task.EncodingJob:
        queries = one_each(tensors, "query")
        documents = strings(tensors, "documents")
        if len(queries) != len(documents):
            raise InputError(f"documents has {len(documents)} rows and query {len(queries)}; send one row a query")
        pairs = [(query, document) for query, row in zip(queries, documents) for document in row]
        options = {
            "shape": (len(documents), len(documents[0])),
            "function": choice(tensors, "function_to_apply", self.parameters["function"], ("sigmoid", "none")),
        }
        return task.EncodingJob(list(pairs), options, self.wants_truncation(tensors))

    def answer(
        self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> dict[str, np.ndarray]:
        logits = np.stack([output["logits"] for output in outputs]).reshape(job.options["shape"])
        scores = FUNCTIONS[job.options["function"]](logits).astype(np.float32)
        return {"score": scores, "order": np.argsort(-scores, axis=-1, kind="stable").astype(np.int32)}
