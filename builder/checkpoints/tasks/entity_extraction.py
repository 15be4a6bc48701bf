"""Entities of a text by the labels that a request names, found by a GLiNER checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from builder.checkpoints.checkpoint import Checkpoint, CheckpointFiles
from builder.checkpoints.distances import PairedNumbers, paired_scores
from builder.checkpoints.gliner.layers import GlinerHead, SpanMarkers
from builder.checkpoints.gliner.predict import predict_entities
from builder.checkpoints.gliner.settings import FILE, GLINER, GlinerSettings
from builder.checkpoints.gliner.weights import load_head
from builder.checkpoints.metrics import Span, score_spans, spans_of
from builder.checkpoints.tasks.base import Answer, EncoderTask, Sample, TaskGraph, once_a_checkpoint
from builder.common.errors import CheckpointError
from builder.common.samples import MORE_TEXTS, TEXTS
from builder.runtime.encoder.words import words_of

LABELS = ("person", "location", "organization", "date", "animal", "product", "event")
CERTAIN = 0.5  # scores above it are answered by default


def _samples(texts: Sequence[str]) -> tuple[Sample, ...]:
    """Return requests for all entities, which rounding cannot move past a threshold, with 2 to 7 labels each."""
    return tuple(
        {"text_input": text, "labels": list(LABELS[: 2 + place % 6]), "threshold": 0.0}
        for place, text in enumerate(texts)
    )


class ExtractionGraph(TaskGraph):
    """Logits of spans (rows, words, width, labels), or of words (rows, words, labels, 3).

    Spans that end after a row's last word have the logit 0.
    """

    def __init__(self, model: PreTrainedModel, inputs: Sequence[str], head: GlinerHead) -> None:
        super().__init__(model, inputs, ("logits",))
        self.head = head

    def select(self, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        words, labels = tensors.pop("words"), tensors.pop("labels")
        features = self.model(**tensors).last_hidden_state
        if hasattr(self.head, "scorer"):
            return (self.head(features, words, labels),)
        of_words, of_labels = self.head.vectors(features, words, labels)
        markers = cast(SpanMarkers, self.head.span_rep_layer.span_rep_layer)
        logits = markers.logits(markers.hidden(of_words, self.head.width), self.head.prompt_rep_layer(of_labels))
        counts = (words > 0).sum(dim=1)
        ends = torch.arange(words.shape[1]).unsqueeze(1) + torch.arange(self.head.width)
        is_span = ends.unsqueeze(0) < counts[:, None, None]
        return (logits * is_span.unsqueeze(-1),)


class EntityExtraction(EncoderTask):
    name = "entity-extraction"
    head = "feature-extraction"
    precedence = 4
    per_token = False
    extra_inputs: tuple[str, ...] = ("words", "labels")
    metric = "entity agreement"
    threshold = 0.99
    labels = ("entities",)
    samples = _samples(TEXTS)
    more_samples = _samples(MORE_TEXTS)

    def claims(self, config: PreTrainedConfig, saved_by: str | None) -> bool:
        return saved_by == GLINER

    def prepare(self, files: CheckpointFiles) -> CheckpointFiles:
        """Return the checkpoint. Raises CheckpointError for one without settings or without its marker of labels."""
        settings, tokenizer = _settings(files), files.tokenizer
        marker = tokenizer.convert_tokens_to_ids(settings.label_marker)
        if marker != settings.label_marker_id:
            raise CheckpointError(
                f"{files.source} has class_token_index {settings.label_marker_id} in {FILE}; the token "
                f"{settings.label_marker} of its tokenizer is {marker}: they do not belong together"
            )
        tokenizer.model_input_names = ["input_ids", "attention_mask"]  # the library passes no others
        return files

    def graph(self, checkpoint: Checkpoint, inputs: Sequence[str]) -> TaskGraph:
        return ExtractionGraph(checkpoint.model, inputs, load_head(checkpoint))

    def samples_for(self, checkpoint: Checkpoint) -> tuple[Sample, ...]:
        most = _settings(checkpoint).max_words
        return tuple(sample for sample in self.samples if len(words_of(sample["text_input"])) <= most)

    def parameters(self, checkpoint: Checkpoint) -> dict[str, Any]:
        settings = _settings(checkpoint)
        return {
            "scores": settings.span_mode,
            "max_width": settings.max_width,
            "max_words": settings.max_words,
            "pooling": settings.pooling,
            "label_marker": settings.label_marker,
            "separator": settings.separator,
            "embeds_marker": settings.embeds_marker,
        }

    def reference(self, checkpoint: Checkpoint, sample: Sample) -> Answer:
        """Return the entities that GLiNER's own computation finds in one text alone."""
        head = once_a_checkpoint("gliner", lambda: load_head(checkpoint))
        options = {key: sample[key] for key in ("threshold", "flat_ner", "multi_label") if key in sample}
        entities = predict_entities(checkpoint, head, sample["text_input"], sample["labels"], **options)
        return {"entities": json.dumps(entities, ensure_ascii=False)}

    def scores(self, answer: Answer) -> dict[Span, float]:
        """Return the score of each entity, by (begin, end, label)."""
        return {(e["start"], e["end"], e["label"]): e["score"] for e in json.loads(answer["entities"])}

    def agreement(self, expected: Answer, actual: Answer) -> float:
        """Return the share of the entities of either answer that both have, of those that are answered by default.

        A higher threshold leaves the others as they are: spans are chosen from the highest score on. If neither answer
        has one, 1 less the mean change of the scores that are more than half of the best: which of many unlikely
        entities is first changes with the last digits.
        """
        first, second = self.scores(expected), self.scores(actual)
        if _has_nan(first, second):
            return 0.0
        best = max((*first.values(), *second.values()), default=0.0)
        least = CERTAIN if best > CERTAIN else best / 2
        of_either = {key for one in (first, second) for key, score in one.items() if score > least}
        pairs = [(first.get(key, 0.0), second.get(key, 0.0)) for key in of_either]
        if not pairs:
            return 1.0
        if best > CERTAIN:
            return sum(min(pair) > CERTAIN for pair in pairs) / len(pairs)
        return 1 - sum(abs(one - other) for one, other in pairs) / len(pairs)

    def numbers(self, expected: Answer, actual: Answer) -> Mapping[str, PairedNumbers]:
        first, second = self.scores(expected), self.scores(actual)
        both = [key for key in first if key in second]
        return {"the score of an entity": paired_scores([first[key] for key in both], [second[key] for key in both])}

    def difference(self, expected: Answer, actual: Answer) -> tuple[float, str]:
        """Compare the scores; of an entity that only one answer has, see `_lone`."""
        first, second = self.scores(expected), self.scores(actual)
        if _has_nan(first, second):
            return math.inf, "an entity's score, which is not a number"
        errors = [(abs(score - second[key]), key) for key, score in first.items() if key in second]
        error, key = max(errors + _lone(first, second, self.exclude), default=(0.0, None))
        return error, f"the entity {key}"

    def exclude(self, one: Span, other: Span) -> bool:
        """Return True if only one of two entities can be in an answer: they overlap."""
        return one[0] < other[1] and other[0] < one[1]

    def score(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, float]:
        """Score against labels: `entities`, a list of {"start", "end", "label"}, in characters."""
        expected = [spans_of(sample["entities"]) for sample in samples]
        predicted = [spans_of(json.loads(answer["entities"])) for answer in answers]
        return score_spans([sample["text_input"] for sample in samples], expected, predicted)


def _has_nan(first: Mapping[Span, float], second: Mapping[Span, float]) -> bool:
    return any(math.isnan(score) for score in (*first.values(), *second.values()))


def _lone(
    first: Mapping[Span, float], second: Mapping[Span, float], exclude: Callable[[Span, Span], bool]
) -> list[tuple[float, Span]]:
    """Return entities that only one answer has, each with the least change of a score that makes it disappear.

    That takes its score to the threshold, lets another score overtake it, or lets the other entity, which excludes it
    in the other answer, disappear from this one. The threshold is the default one unless a score is below it; then it
    is taken for 0, as in the build's samples.
    """
    threshold = CERTAIN if min((*first.values(), *second.values()), default=0.0) >= CERTAIN else 0.0
    lone = [(score, key, 0) for key, score in first.items() if key not in second]
    lone += [(score, key, 1) for key, score in second.items() if key not in first]
    changes: list[tuple[float, Span, int, float]] = []  # score, entity, answer and change of those with higher scores
    for score, key, side in sorted(lone, reverse=True):
        rivals = [one for one in lone if one[2] != side and exclude(one[1], key)]
        known = [change for _, rival, answer, change in changes if (rival, answer) in {one[1:] for one in rivals}]
        change = min([score - threshold, *known, *(abs(score - rival) for rival, _, _ in rivals)])
        changes.append((score, key, side, change))
    return [(change, key) for _, key, _, change in changes]


def _settings(files: CheckpointFiles) -> GlinerSettings:
    if not isinstance(files.gliner, GlinerSettings):
        raise CheckpointError(f"{files.source} has no {FILE}: entity-extraction is for checkpoints of {GLINER}")
    return files.gliner


TASK = EntityExtraction()
