"""Score labels named in the request, with a model of textual entailment (Yin et al., 2019, arXiv:1909.00161)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...fields import Field, InputError, Tensors, as_bytes, one_each, option, strings
from .. import task
from ..scores import softmax


class Task(task.Task):
    strategy = "only_first"  # the hypothesis is never cut

    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (
            Field("text_input", "TYPE_STRING"),
            Field("candidate_labels", "TYPE_STRING", (-1,)),
            Field("hypothesis_template", "TYPE_STRING", optional=True),
            Field("multi_label", "TYPE_BOOL", optional=True),
        )

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (Field("label", "TYPE_STRING", (-1,)), Field("score", "TYPE_FP32", (-1,)))

    def read(self, tensors: Tensors) -> task.EncodingJob:
        texts = one_each(tensors, "text_input")
        labels = strings(tensors, "candidate_labels")
        if len(labels) != len(texts):
            raise InputError(f"candidate_labels has {len(labels)} rows and text_input {len(texts)}; send one for each")
        template = str(option(tensors, "hypothesis_template", "This example is {}."))
        rest = template.replace("{}", "", 1)
        if rest == template or "{" in rest or "}" in rest:
            raise InputError(f"hypothesis_template is {template!r}; expected {{}} once, where the label goes")
        pairs = [(text, template.replace("{}", label)) for text, row in zip(texts, labels) for label in row]
        options = {"labels": labels, "multi_label": bool(option(tensors, "multi_label", False))}
        return task.EncodingJob(list(pairs), options, self.wants_truncation(tensors))

    def answer(
        self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> dict[str, np.ndarray]:
        labels: list[list[str]] = job.options["labels"]
        logits = np.stack([output["logits"] for output in outputs]).reshape(len(labels), len(labels[0]), -1)
        entailment = self.parameters["entailment"]
        if job.options["multi_label"] or len(labels[0]) == 1:
            contradiction = -1 if entailment == 0 else 0
            scores = softmax(logits[..., [contradiction, entailment]])[..., 1]
        else:
            scores = softmax(logits[..., entailment])
        best = np.argsort(-scores, axis=-1, kind="stable")
        return {
            "label": as_bytes([[names[i] for i in row] for names, row in zip(labels, best)]),
            "score": np.take_along_axis(scores, best, axis=-1).astype(np.float32),
        }
