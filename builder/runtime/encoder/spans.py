"""Choose entities among spans of words with scores: the best first, without overlaps.

Source: gliner 0.2.29, decoding/decoder.py (greedy_search) and decoding/utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Spans:
    """Spans of words: their first and last words, labels and scores, (spans) each."""

    first: np.ndarray
    last: np.ndarray
    label: np.ndarray
    score: np.ndarray

    def at(self, places: "np.ndarray | list[int]") -> Spans:
        """Return the spans at `places`."""
        return Spans(self.first[places], self.last[places], self.label[places], self.score[places])

    def placed(self, words: "list[int]") -> Spans:
        """Return the spans with the numbers `words` instead of 0, 1, ..."""
        numbers = np.array(words, np.int64)
        return Spans(numbers[self.first], numbers[self.last], self.label, self.score)


def join(parts: "list[Spans]") -> Spans:
    """Return all spans of `parts`, one after the other."""
    names = ("first", "last", "label", "score")
    return Spans(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def spans_above(scores: np.ndarray, threshold: float) -> Spans:
    """Return the spans with a score above `threshold`: scores (words, width, labels) of spans from each word."""
    words, width, _ = scores.shape
    inside = np.arange(words)[:, None] + np.arange(width) < words
    first, longer, label = np.nonzero((scores > threshold) & inside[..., None])
    return Spans(first, first + longer, label, scores[first, longer, label])


def spans_of_words(scores: np.ndarray, threshold: float) -> Spans:
    """Return the spans whose words begin, end and are inside an entity: scores (words, labels, 3) above `threshold`.

    The score of a span is the least of those.
    """
    found = []
    begins, ends = scores[..., 0] > threshold, scores[..., 1] > threshold
    for label in range(scores.shape[1]):
        for first in np.flatnonzero(begins[:, label]):
            inside = np.minimum.accumulate(scores[first:, label, 2])
            reach = np.flatnonzero(ends[first:, label] & (inside >= threshold))
            if len(reach):
                score = np.minimum(np.minimum(inside, scores[first:, label, 1]), scores[first, label, 0])[reach]
                found.append((np.full(len(reach), first), first + reach, np.full(len(reach), label), score))
    if not found:
        empty = np.zeros(0, np.int64)
        return Spans(empty, empty, empty, np.zeros(0, np.float32))
    spans = Spans(*(np.concatenate(parts) for parts in zip(*found)))
    return spans.at(np.lexsort((spans.last, spans.label, spans.first)))


def without_overlaps(spans: Spans, flat: bool, several_labels: bool) -> Spans:
    """Return the best spans that do not overlap, by their first word.

    Unless `flat`, one may be inside another. With `several_labels`, one span may have several.
    """
    firsts, lasts = np.zeros(len(spans.first), np.int64), np.zeros(len(spans.first), np.int64)
    kept: "list[int]" = []
    labels: "dict[tuple[int, int], set[int]]" = {}
    for place in np.argsort(-spans.score, kind="stable").tolist():
        first, last, label = int(spans.first[place]), int(spans.last[place]), int(spans.label[place])
        others = labels.get((first, last))
        if others is not None:
            if not several_labels or label in others:  # windows share words
                continue
        elif _overlaps(first, last, firsts[: len(labels)], lasts[: len(labels)], flat):
            continue
        else:
            firsts[len(labels)], lasts[len(labels)] = first, last
        labels.setdefault((first, last), set()).add(label)
        kept.append(place)
    best = spans.at(kept)
    return best.at(np.argsort(best.first, kind="stable"))


def _overlaps(first: int, last: int, firsts: np.ndarray, lasts: np.ndarray, flat: bool) -> bool:
    """Return True if a span overlaps one of others; unless `flat`, one that is inside the other does not count."""
    if flat:
        return bool(((firsts <= last) & (first <= lasts)).any())
    begins_before = (firsts < first) & (first <= lasts) & (lasts < last)
    ends_after = (first < firsts) & (firsts <= last) & (last < lasts)
    return bool((begins_before | ends_after).any())
