"""Entities of a text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.distances import PairedNumbers, paired_scores
from builder.checkpoints.metrics import score_spans, spans_of
from builder.checkpoints.tasks.base import Answer, EncoderTask, Sample, label_list, pipeline_of, probe
from builder.common.samples import MORE_TEXTS, TEXTS


class TokenClassification(EncoderTask):
    name = "token-classification"
    head = "token-classification"
    precedence = 1
    metric = "token label agreement"
    threshold = 0.99
    labels = ("entities",)
    samples = tuple({"text_input": text, "ignore_labels": ["no such label"]} for text in TEXTS)
    more_samples = tuple({"text_input": text, "ignore_labels": ["no such label"]} for text in MORE_TEXTS)

    def parameters(self, checkpoint: Checkpoint) -> dict[str, Any]:
        tokenizer = checkpoint.tokenizer
        with torch.no_grad():
            outputs = checkpoint.model(**probe(checkpoint)).logits.shape[-1]
        return {
            "labels": label_list(checkpoint.config, outputs),
            "unk_id": tokenizer.unk_token_id,
            "word_aware": bool(getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None)),
        }

    def reference(self, checkpoint: Checkpoint, sample: Sample) -> Answer:
        options = {key: sample[key] for key in ("aggregation_strategy", "ignore_labels") if key in sample}
        entities = pipeline_of(checkpoint, "token-classification")(sample["text_input"], **options)
        return {"entities": json.dumps(entities, default=float, ensure_ascii=False)}

    def agreement(self, expected: Answer, actual: Answer) -> float:
        first, second = _scores(expected).keys(), _scores(actual).keys()
        return len(first & second) / max(1, len(first | second))

    def numbers(self, expected: Answer, actual: Answer) -> Mapping[str, PairedNumbers]:
        first, second = _scores(expected), _scores(actual)
        kinds: dict[str, tuple[list[float], list[float]]] = {}
        for span in (span for span in first if span in second):
            sides = kinds.setdefault(f"the score of {span[2]}", ([], []))
            sides[0].append(first[span])
            sides[1].append(second[span])
        return {kind: paired_scores(*sides) for kind, sides in kinds.items()}

    def score(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, float]:
        """Score against labels: `entities`, a list of {"start", "end", "entity"}, in characters."""
        expected = [spans_of(sample["entities"]) for sample in samples]
        predicted = [spans_of(json.loads(answer["entities"])) for answer in answers]
        return score_spans([sample["text_input"] for sample in samples], expected, predicted)


def _scores(answer: Answer) -> dict[tuple[int, int, str], float]:
    """Return the score of each entity, by (begin, end, label)."""
    entities = json.loads(answer["entities"])
    return {(e["start"], e["end"], e.get("entity", e.get("entity_group"))): e["score"] for e in entities}


TASK = TokenClassification()
