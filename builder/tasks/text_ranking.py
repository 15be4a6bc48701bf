"""Relevance of documents to a query, by a cross-encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from builder.errors import CheckpointError
from builder.metrics import ranking
from builder.samples import TEXTS
from builder.tasks.base import Answer, Sample
from builder.tasks.text_classification import TextClassification, head_size

if TYPE_CHECKING:
    from builder.checkpoint import Checkpoint
    from builder.spec import BuildSpec


class TextRanking(TextClassification):
    name = "text-ranking"
    precedence = 3
    metric = "rank correlation"
    labels = ("relevance",)
    samples = tuple({"query": TEXTS[i], "documents": list(TEXTS[i + 1 : i + 9])} for i in range(20))

    def claims(self, config: PreTrainedConfig, sentence_transformer: bool) -> bool:
        return super().claims(config, sentence_transformer) and hasattr(config, "sentence_transformers")

    def parameters(self, checkpoint: Checkpoint, spec: BuildSpec) -> dict[str, Any]:
        outputs = head_size(checkpoint)
        if outputs != 1:
            raise CheckpointError(f"text-ranking needs a head with one output, a relevance; this one has {outputs}")
        return {"function": self._function(checkpoint.config)}

    def _function(self, config: PreTrainedConfig) -> str:
        """sentence-transformers' CrossEncoder applies the activation it saved, a sigmoid where it saved none."""
        saved = getattr(config, "sentence_transformers", None) or {}
        name = (saved.get("activation_fn") or "Sigmoid").rsplit(".", 1)[-1].split("(")[0]
        functions = {"Sigmoid": "sigmoid", "Identity": "none"}
        if name not in functions:
            raise CheckpointError(
                f"the cross-encoder's activation {name} is not known; known are {', '.join(functions)}"
            )
        return functions[name]

    def reference(self, checkpoint: Checkpoint, spec: BuildSpec, sample: Sample) -> Answer:
        """One pair at a time through the model, as sentence-transformers' CrossEncoder.predict computes it."""
        scores = []
        for document in sample["documents"]:
            encoded = checkpoint.tokenizer(sample["query"], document, return_tensors="pt")
            with torch.no_grad():
                logit = checkpoint.model(**encoded).logits[0, 0]
            scores.append(float(torch.sigmoid(logit) if self._function(checkpoint.config) == "sigmoid" else logit))
        return {"score": scores, "order": sorted(range(len(scores)), key=lambda i: -scores[i])}

    def agreement(self, expected: Answer, actual: Answer) -> float:
        """Spearman's rank correlation of the scores; they are real numbers, so ties are left out of account."""
        if len(expected["score"]) < 2:
            return 1.0
        ranks = np.stack([np.argsort(np.argsort(answer["score"])) for answer in (expected, actual)])
        return float(np.corrcoef(ranks)[0, 1])

    def score(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, float]:
        """`relevance`: of each document, a number."""
        return ranking([sample["relevance"] for sample in samples], [answer["score"] for answer in answers])


TASK = TextRanking()
