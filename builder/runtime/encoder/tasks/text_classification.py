"""Label a text or a pair of texts; return the labels with their scores, best first.

With the parameter `class_scores` also the scores of all classes, in the order of `labels`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...fields import Field, InputError, Tensors, as_bytes, choice, count, one_each
from .. import task
from ..scores import CLASS_SCORES, FUNCTIONS


class Task(task.Task):
    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (
            Field("text_input", "TYPE_STRING"),
            Field("text_pair", "TYPE_STRING", optional=True),
            Field("top_k", "TYPE_INT32", optional=True),
            Field("function_to_apply", "TYPE_STRING", optional=True),
        )

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        best = (Field("label", "TYPE_STRING", (-1,)), Field("score", "TYPE_FP32", (-1,)))
        if not parameters.get(CLASS_SCORES):
            return best
        size = -1 if parameters.get(task.OWN_LABELS) else len(parameters["labels"])
        return (*best, Field(CLASS_SCORES, "TYPE_FP32", (size,)))

    def read(self, tensors: Tensors) -> task.EncodingJob:
        texts = one_each(tensors, "text_input")
        labels = len(self.parameters["labels"])
        options = {
            "top_k": min(count(tensors, "top_k", 1), labels),
            "function": choice(tensors, "function_to_apply", self.parameters["function"], tuple(FUNCTIONS)),
        }
        if "text_pair" not in tensors:
            return task.EncodingJob(list(texts), options, self.wants_truncation(tensors))
        pairs = one_each(tensors, "text_pair")
        if len(pairs) != len(texts):
            raise InputError(f"text_pair has {len(pairs)} rows and text_input {len(texts)}; send one pair a text")
        return task.EncodingJob(list(zip(texts, pairs)), options, self.wants_truncation(tensors))

    def answer(
        self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> dict[str, np.ndarray]:
        labels: list[str] = self.parameters["labels"]
        logits = np.stack([output["logits"][: len(labels)] for output in outputs])  # other adapters may have more
        scores = FUNCTIONS[job.options["function"]](logits)
        best = np.argsort(-scores, axis=-1, kind="stable")[:, : job.options["top_k"]]
        answer = {
            "label": as_bytes([[labels[i] for i in row] for row in best]),
            "score": np.take_along_axis(scores, best, axis=-1).astype(np.float32),
        }
        return {**answer, CLASS_SCORES: scores.astype(np.float32)} if self.parameters.get(CLASS_SCORES) else answer
