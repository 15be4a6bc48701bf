"""Entities of a text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import TokenClassificationPipeline

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.distances import PairedNumbers, paired_scores
from builder.checkpoints.metrics import score_spans
from builder.checkpoints.metrics import spans_of as spans_in
from builder.checkpoints.tasks.base import (
    Answer,
    EncoderTask,
    Sample,
    head_size,
    label_list,
    once_a_checkpoint,
    pipeline_of,
)
from builder.checkpoints.transitions import read_transition_biases
from builder.common.samples import MORE_TEXTS, TEXTS
from builder.runtime.encoder.tags import Tag, TagDecoder, entities_of, spans_of, tags_of
from builder.runtime.encoder.tasks.token_classification import VITERBI


class TokenClassification(EncoderTask):
    name = "token-classification"
    head = "token-classification"
    precedence = 1
    takes_adapters = True
    metric = "token label agreement"
    threshold = 0.99
    labels = ("entities",)
    samples = tuple({"text_input": text, "ignore_labels": ["no such label"]} for text in TEXTS)
    more_samples = tuple({"text_input": text, "ignore_labels": ["no such label"]} for text in MORE_TEXTS)

    def parameters(self, checkpoint: Checkpoint) -> dict[str, Any]:
        tokenizer = checkpoint.tokenizer
        labels = label_list(checkpoint.config, head_size(checkpoint))
        biases = {} if tags_of(labels) is None else {"transition_biases": read_transition_biases(checkpoint.folder)}
        return {
            "labels": labels,
            "unk_id": tokenizer.unk_token_id,
            "word_aware": bool(getattr(tokenizer.backend_tokenizer.model, "continuing_subword_prefix", None)),
            **biases,
        }

    def reference(self, checkpoint: Checkpoint, sample: Sample) -> Answer:
        """Return the pipeline's answer; for tags that say where an entity ends, in groups that the pipeline lacks."""
        options = {key: sample[key] for key in ("aggregation_strategy", "ignore_labels") if key in sample}
        tags = tags_of(label_list(checkpoint.config, len(checkpoint.config.id2label)))
        if tags is None:
            pipeline = pipeline_of(checkpoint, self.name)
        elif options.get("aggregation_strategy") == VITERBI:
            return _document(_likeliest(checkpoint, sample, tags))
        else:
            pipeline = once_a_checkpoint(
                "tags",
                partial(
                    _TagPipeline,
                    model=checkpoint.model,
                    tokenizer=checkpoint.tokenizer,
                    task=self.name,
                    device="cpu",
                ),
            )
        return _document(pipeline(sample["text_input"], **options))

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
        expected = [spans_in(sample["entities"]) for sample in samples]
        predicted = [spans_in(json.loads(answer["entities"])) for answer in answers]
        return score_spans([sample["text_input"] for sample in samples], expected, predicted)


class _TagPipeline(TokenClassificationPipeline):  # type: ignore[misc]
    """Group tokens by tags that say where an entity ends."""

    def group_entities(self, entities: list[dict[str, Any]]) -> list[dict[str, Any]]:
        labels = list(self.model.config.id2label.values())
        tags = dict(zip(labels, tags_of(labels) or (), strict=True))
        groups = entities_of([tags[entity["entity"]] for entity in entities])
        return [self.group_sub_entities(entities[group]) for group in groups]


def _likeliest(checkpoint: Checkpoint, sample: Sample, tags: Sequence[Tag]) -> list[dict[str, Any]]:
    """Return the entities of the likeliest tags over PyTorch's scores, without those that `sample` leaves out."""
    text = sample["text_input"]
    inputs = checkpoint.tokenizer(
        text, return_tensors="pt", return_offsets_mapping=True, return_special_tokens_mask=True
    )
    own = inputs.pop("special_tokens_mask")[0] == 0
    offsets = inputs.pop("offset_mapping")[0][own].tolist()
    with torch.no_grad():
        scores = checkpoint.model(**inputs).logits[0][own].log_softmax(-1).numpy()
    path = TagDecoder(tags, read_transition_biases(checkpoint.folder))(scores)
    likely = np.exp(scores[np.arange(len(path)), path])
    return [
        {
            "entity_group": span.type,
            "score": likely[span.tokens].mean(),
            "word": text[span.start : span.end],
            "start": span.start,
            "end": span.end,
        }
        for span in spans_of(text, [tags[tag] for tag in path], offsets)
        if span.type not in sample.get("ignore_labels", ())
    ]


def _document(entities: list[dict[str, Any]]) -> Answer:
    return {"entities": json.dumps(entities, default=float, ensure_ascii=False)}


def _scores(answer: Answer) -> dict[tuple[int, int, str], float]:
    """Return the score of each entity, by (begin, end, label)."""
    entities = json.loads(answer["entities"])
    return {(e["start"], e["end"], e.get("entity", e.get("entity_group"))): e["score"] for e in entities}


TASK = TokenClassification()
