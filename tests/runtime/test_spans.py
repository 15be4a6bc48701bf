"""The choice of entities among spans: as one by one from the best on, in few steps, and of a limited number."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest

from builder.runtime.encoder import spans as module
from builder.runtime.encoder.spans import MAX_SPANS, Spans, join, spans_above, spans_of_words, without_overlaps
from builder.runtime.fields import InputError


def _one_by_one(spans: Spans, flat: bool, several_labels: bool) -> list[int]:
    """Return the places of the spans that the library keeps: each that conflicts with none that is better."""
    kept: list[int] = []
    for place in np.argsort(-spans.score, kind="stable").tolist():
        first, last, label = spans.first[place], spans.last[place], spans.label[place]
        for other in kept:
            if (first, last) == (spans.first[other], spans.last[other]):
                conflicts = not several_labels or label == spans.label[other]
            else:
                apart = last < spans.first[other] or spans.last[other] < first
                inside = spans.first[other] <= first and last <= spans.last[other]
                around = first <= spans.first[other] and spans.last[other] <= last
                conflicts = not apart and (flat or not (inside or around))
            if conflicts:
                break
        else:
            kept.append(place)
    return sorted(kept, key=lambda place: spans.first[place])


@pytest.mark.parametrize("several_labels", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_spans_are_those_chosen_one_by_one(flat: bool, several_labels: bool) -> None:
    """With scores that are equal, spans that two windows have, and nothing at all."""
    random = np.random.default_rng(3)
    for words, width, labels in ((9, 4, 3), (1, 3, 2), (20, 20, 1), (6, 2, 5)):
        scores = np.round(random.random((words, width, labels)), 1)
        window = spans_above(scores, 0.2)
        spans = join([window, window.placed(list(range(2, words + 2))), spans_above(scores, 1.0)])
        chosen, places = without_overlaps(spans, flat, several_labels), _one_by_one(spans, flat, several_labels)
        for name in ("first", "last", "label", "score"):
            assert getattr(chosen, name).tolist() == getattr(spans, name)[places].tolist()
    assert len(without_overlaps(spans_above(scores, 1.0), flat, several_labels).score) == 0


def test_spans_are_compared_with_the_kept_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: with threshold 0 each of all pairs of words was visited in a loop of Python."""
    overlaps = Mock(side_effect=module._overlaps)
    monkeypatch.setattr(module, "_overlaps", overlaps)
    spans = spans_of_words(np.random.default_rng(5).random((40, 3, 3)), 0.0)
    assert len(spans.score) == 3 * 40 * 41 // 2
    chosen = without_overlaps(spans, True, False)
    assert overlaps.call_count == len(chosen.score) <= 40


def test_too_many_spans_are_refused() -> None:
    """Regression: a request with threshold 0 filled the memory with pairs of words."""
    with pytest.raises(InputError, match="raise threshold"):
        spans_of_words(np.full((400, 3, 3), 0.9, np.float32), 0.0)
    places = np.zeros(MAX_SPANS + 1, np.int64)
    spans = Spans(places, places, places, np.ones(MAX_SPANS + 1))
    with pytest.raises(InputError, match="raise threshold"):
        without_overlaps(spans, True, False)
    assert len(without_overlaps(spans.at(places[1:]), True, False).score) == 1
