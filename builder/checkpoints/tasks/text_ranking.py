"""Relevance of documents to a query, by a cross-encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.distances import PairedNumbers, paired_scores
from builder.checkpoints.metrics import score_ranking
from builder.checkpoints.sentence_transformers.kinds import CROSS_ENCODER
from builder.checkpoints.tasks.base import Answer, Sample
from builder.checkpoints.tasks.text_classification import TextClassification, head_size
from builder.common.errors import CheckpointError
from builder.common.samples import TEXTS

SAVED = ("sentence_transformers", "sbert_ce_default_activation_function")  # keys of a cross-encoder's config.json
FUNCTIONS = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "none",
    "torch.nn.Sigmoid": "sigmoid",
    "torch.nn.Identity": "none",
}


class TextRanking(TextClassification):
    name = "text-ranking"
    precedence = 3
    metric = "rank correlation"
    labels = ("relevance",)
    samples = tuple({"query": TEXTS[i], "documents": list(TEXTS[i + 1 : i + 9])} for i in range(20))

    def claims(self, config: PreTrainedConfig, saved_by: str | None) -> bool:
        by_a_cross_encoder = saved_by == CROSS_ENCODER or any(hasattr(config, key) for key in SAVED)
        return super().claims(config, saved_by) and by_a_cross_encoder and config.num_labels == 1

    def parameters(self, checkpoint: Checkpoint) -> dict[str, Any]:
        outputs = head_size(checkpoint)
        if outputs != 1:
            raise CheckpointError(f"text-ranking needs a head with one output, a relevance; this one has {outputs}")
        return {"function": self._function(checkpoint)}

    def _function(self, checkpoint: Checkpoint) -> str:
        """Return the activation that sentence-transformers' CrossEncoder saved, a sigmoid where it saved none.

        Its places, the first that is there (cross_encoder/model.py, 6.2): config_sentence_transformers.json, then
        `sentence_transformers` of config.json (from 4.0), then `sbert_ce_default_activation_function` (before).
        """
        config, sentence = checkpoint.config, checkpoint.sentence
        newer, older = (getattr(config, key, None) for key in SAVED)
        name = sentence.activation if sentence is not None else None
        if name is None:
            name = newer["activation_fn"] if newer and "activation_fn" in newer else older
        function = "sigmoid" if name is None else FUNCTIONS.get(name)
        if function is None:
            raise CheckpointError(
                f"the cross-encoder's activation {name} is not known; known are {', '.join(sorted(FUNCTIONS))}"
            )
        return function

    def reference(self, checkpoint: Checkpoint, sample: Sample) -> Answer:
        """Run one pair at a time through the model, as sentence-transformers' CrossEncoder.predict computes it."""
        scores = []
        for document in sample["documents"]:
            encoded = checkpoint.tokenizer(sample["query"], document, return_tensors="pt")
            with torch.no_grad():
                logit = checkpoint.model(**encoded).logits[0, 0]
            scores.append(float(torch.sigmoid(logit) if self._function(checkpoint) == "sigmoid" else logit))
        return {"score": scores, "order": sorted(range(len(scores)), key=lambda i: -scores[i])}

    def agreement(self, expected: Answer, actual: Answer) -> float:
        """Return Spearman's rank correlation of the scores; they are real numbers, so it ignores ties."""
        if len(expected["score"]) < 2:
            return 1.0
        ranks = np.stack([np.argsort(np.argsort(answer["score"])) for answer in (expected, actual)])
        return float(np.corrcoef(ranks)[0, 1])

    def numbers(self, expected: Answer, actual: Answer) -> Mapping[str, PairedNumbers]:
        return {"the score of a document": paired_scores(expected["score"], actual["score"])}

    def score(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, float]:
        """Score against labels: `relevance`, a number for each document."""
        return score_ranking([sample["relevance"] for sample in samples], [answer["score"] for answer in answers])


TASK = TextRanking()
