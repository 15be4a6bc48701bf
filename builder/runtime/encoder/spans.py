"""Choose entities among spans of words with scores: the best first, without overlaps.

Source: gliner 0.2.29, decoding/decoder.py (greedy_search) and decoding/utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..fields import InputError

MAX_SPANS = 200_000  # of one text, above its threshold


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
    return _spans_at(scores, scores > threshold)


def spans_from(scores: np.ndarray, threshold: float) -> Spans:
    """Return the spans with a score of `threshold` or above: scores (words, width, labels) of spans from each word."""
    return _spans_at(scores, scores >= threshold)


def _spans_at(scores: np.ndarray, chosen: np.ndarray) -> Spans:
    words, width, _ = scores.shape
    inside = np.arange(words)[:, None] + np.arange(width) < words
    first, longer, label = np.nonzero(chosen & inside[..., None])
    return Spans(first, first + longer, label, scores[first, longer, label])


def spans_of_words(scores: np.ndarray, threshold: float) -> Spans:
    """Return the spans whose words begin, end and are inside an entity: scores (words, labels, 3) above `threshold`.

    The score of a span is the least of those. Raises InputError for too many spans.
    """
    found = []
    count = 0
    begins, ends = scores[..., 0] > threshold, scores[..., 1] > threshold
    for label in range(scores.shape[1]):
        for first in np.flatnonzero(begins[:, label]):
            inside = np.minimum.accumulate(scores[first:, label, 2])
            reach = np.flatnonzero(ends[first:, label] & (inside >= threshold))
            count += len(reach)
            _refuse_many(count)
            if len(reach):
                score = np.minimum(np.minimum(inside, scores[first:, label, 1]), scores[first, label, 0])[reach]
                found.append((np.full(len(reach), first), first + reach, np.full(len(reach), label), score))
    if not found:
        empty = np.zeros(0, np.int64)
        return Spans(empty, empty, empty, np.zeros(0, np.float32))
    spans = Spans(*(np.concatenate(parts) for parts in zip(*found)))
    return spans.at(np.lexsort((spans.last, spans.label, spans.first)))


def without_overlaps(spans: Spans, flat: bool, several_labels: bool) -> Spans:
    """Return the best spans that do not overlap, by their first word and then from the best on.

    Unless `flat`, one may be inside another. With `several_labels`, one span may have several. Raises InputError for
    too many spans.
    """
    _refuse_many(len(spans.score))
    left = np.argsort(-spans.score, kind="stable")
    kept = [left[:0]]
    while len(left):
        first, last = spans.first[left], spans.last[left]
        same = (first == first[0]) & (last == last[0])
        own = left[same] if several_labels else left[:1]
        kept.append(own[np.unique(spans.label[own], return_index=True)[1]])  # windows that share words repeat a label
        left = left[~(same | _overlaps(first, last, flat))]
    places = np.concatenate(kept)
    return spans.at(places[np.lexsort((places, -spans.score[places], spans.first[places]))])


def _overlaps(first: np.ndarray, last: np.ndarray, flat: bool) -> np.ndarray:
    """Return which spans overlap the first of them; unless `flat`, one that is inside the other does not count."""
    if flat:
        overlaps: np.ndarray = (first <= last[0]) & (first[0] <= last)
        return overlaps
    begins_before = (first < first[0]) & (first[0] <= last) & (last < last[0])
    ends_after = (first[0] < first) & (first <= last[0]) & (last[0] < last)
    crosses: np.ndarray = begins_before | ends_after
    return crosses


def _refuse_many(count: int) -> None:
    """Raise InputError for more spans than are compared with each other."""
    if count > MAX_SPANS:
        raise InputError(
            f"more than {MAX_SPANS} spans of a text score above threshold: raise threshold, or send fewer labels or a "
            "shorter text"
        )
