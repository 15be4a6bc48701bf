"""Fill a schema from logits: which spans of a text, how many instances, and which classes.

Source: gliner2 2.1.0, inference/runtime.py (ExtractorRuntimeMixin), inference/candidate_decoder.py (finalize_spans).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .schemas import CLASSIFICATION, ENTITIES, RELATION, Label, Layout, Part
from .scores import sigmoid, softmax
from .spans import spans_from, without_overlaps


def fill(
    schema: "Sequence[Part]",
    layout: Layout,
    text: str,
    words: "Sequence[tuple[int, int]]",
    logits: "Mapping[str, np.ndarray]",
    threshold: float,
) -> "dict[str, Any]":
    """Return entities, classifications, relations and structures, as JSON has them.

    `words`: places in characters; the last may end after `text`, at a full stop that was added. `logits`: of one row,
    "spans" (words, width, labels), "instances" (words, width, instances, fields), "counts" (prompts, classes) and
    "classes" (choices), each with padding; the first words are those of `layout.values`.
    """
    filling = _Filling(layout, text, words, threshold)
    answer: "dict[str, Any]" = {"entities": [], "classifications": {}, "relations": [], "structures": {}}
    counts = iter(logits["counts"].argmax(axis=-1).tolist())
    entity, field, choice = 0, 0, 0
    for part in schema:
        if part.kind == CLASSIFICATION:
            classes = logits["classes"][choice : choice + len(part.labels)]
            answer["classifications"][part.name] = _classes(part, classes)
            choice += len(part.labels)
            continue
        count = next(counts)
        if part.kind == ENTITIES:
            scores = sigmoid(logits["spans"][..., entity : entity + len(part.labels)])
            answer["entities"] = filling.entities(part, scores) if count else []
            entity += len(part.labels)
            continue
        scores = sigmoid(logits["instances"][:, :, :count, field : field + len(part.labels)])
        field += len(part.labels)
        instances = [filling.instance(part, scores[:, :, number]) for number in range(count)]
        if part.kind == RELATION:
            found = [one for one in instances if one["head"] and one["tail"]]
            answer["relations"] += [{"label": part.name, **one} for one in found]
        else:
            answer["structures"][part.name] = [one for one in instances if any(one.values())]
    return answer


def _classes(part: Part, logits: np.ndarray) -> "list[dict[str, Any]]":
    """Return the chosen labels of a classification with their scores, the best first."""
    independent = part.activation == "sigmoid" or (part.activation == "auto" and part.multi_label)
    scores = sigmoid(logits) if independent else softmax(logits)
    order = np.argsort(-scores, kind="stable")
    return chosen_classes(part, [{"label": part.labels[place].name, "score": float(scores[place])} for place in order])


def chosen_classes(part: Part, classes: "list[dict[str, Any]]") -> "list[dict[str, Any]]":
    """Return the classes that score high enough, of those with the best first, or the best alone."""
    chosen = [one for one in classes if one["score"] >= part.threshold] if part.multi_label else []
    return (chosen or classes[:1])[: part.top_k]


class _Filling:
    """Spans of one text."""

    def __init__(self, layout: Layout, text: str, words: "Sequence[tuple[int, int]]", threshold: float) -> None:
        self.text, self.words, self.threshold = text, words, threshold
        self.values = [value.lower() for value in layout.values]

    def entities(self, part: Part, scores: np.ndarray) -> "list[dict[str, Any]]":
        """Return the entities of all types, by their start, from scores (words, width, types)."""
        found = [
            {**{name: span[name] for name in ("start", "end", "text")}, "label": label.name, "score": span["score"]}
            for place, label in enumerate(part.labels)
            for span in self._spans(label, scores[..., place])
        ]
        return sorted(found, key=lambda one: int(one["start"]))

    def instance(self, part: Part, scores: np.ndarray) -> "dict[str, Any]":
        """Return the value of each field: a list, or the best or None; from scores (words, width, fields)."""
        values: "dict[str, Any]" = {}
        for place, label in enumerate(part.labels):
            find = self._choices if label.choices else self._spans
            found = find(label, scores[..., place])
            values[label.name] = (found[0] if found else None) if label.only_best else found
        return values

    def _choices(self, label: Label, scores: np.ndarray) -> "list[dict[str, Any]]":
        """Return the choices that score high enough, or the best of them."""
        found = {choice: float(scores[self.values.index(choice.lower()), 0]) for choice in label.choices}
        best = max(found, key=lambda choice: found[choice])
        kept = [best] if label.only_best else list(found)
        return [{"text": one, "score": found[one]} for one in kept if found[one] >= self._threshold(label)]

    def _spans(self, label: Label, scores: np.ndarray) -> "list[dict[str, Any]]":
        """Return the best spans that do not overlap, by their start, or the best of them."""
        start = len(self.values)
        found = spans_from(scores[start : start + len(self.words), :, None], self._threshold(label))
        if label.only_best:
            best = found.at(np.argsort(-found.score, kind="stable")[:1])
        else:
            best = without_overlaps(found, True, False)
        spans = []
        for first, last, score in zip(best.first.tolist(), best.last.tolist(), best.score.tolist()):
            start, end = self.words[first][0], min(self.words[last][1], len(self.text))
            if start < end:
                spans.append({"start": start, "end": end, "text": self.text[start:end], "score": score})
        return spans

    def _threshold(self, label: Label) -> float:
        return self.threshold if label.threshold is None else label.threshold
