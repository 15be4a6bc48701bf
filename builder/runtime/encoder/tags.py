"""Find entities by tags that say where each of them begins and ends: BIOES and BILOU.

A tag is O outside of entities. Inside, it is a place and the entity's type: B- for its first token, I- for those in the
middle, E- or L- for its last, S- or U- for its only one. Knows scores and offsets; knows nothing about tokenizers.

Source: the `opf` package of openai/privacy-filter, _core/decoding.py (ViterbiCRFDecoder), _core/spans.py and
_core/runtime.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

SCHEMES = ({"B": "B", "I": "I", "E": "E", "S": "S"}, {"B": "B", "I": "I", "L": "E", "U": "S"})
OUTSIDE, FIRST, INSIDE, LAST, ONLY = "O", "B", "I", "E", "S"  # places
OPEN, CLOSED = (FIRST, INSIDE), (OUTSIDE, LAST, ONLY)  # places after which an entity goes on, and does not
FORBIDDEN = -1e9  # score of tags that cannot follow each other
BIASES: "dict[str, tuple[tuple[str, ...], tuple[str, ...]]]" = {  # places of two tags in a row, by the name of the bias
    "background_stay": ((OUTSIDE,), (OUTSIDE,)),
    "background_to_start": ((OUTSIDE,), (FIRST, ONLY)),
    "inside_to_continue": (OPEN, (INSIDE,)),
    "inside_to_end": (OPEN, (LAST,)),
    "end_to_background": ((LAST, ONLY), (OUTSIDE,)),
    "end_to_start": ((LAST, ONLY), (FIRST, ONLY)),
}


class Tag(NamedTuple):
    """Place of a token in an entity, and the entity's type."""

    place: str
    type: str

    def continues(self, before: Tag) -> bool:
        """Return True if a token with this tag belongs to the entity of the token before it; or if both are outside."""
        if self.place == OUTSIDE:
            return before.place == OUTSIDE
        return self.place in (INSIDE, LAST) and before.place in OPEN and self.type == before.type


def tags_of(labels: Sequence[str]) -> "tuple[Tag, ...] | None":
    """Return the tag of each label; None unless all are tags of one scheme, and some say where an entity ends."""
    for scheme in SCHEMES:
        parts = [label.partition("-") for label in labels]
        places = {place for place, dash, name in parts if dash and name}
        others = {label for label, (_, dash, name) in zip(labels, parts) if not (dash and name)}
        if others == {OUTSIDE} and places <= set(scheme) and {FIRST, LAST} <= {scheme[place] for place in places}:
            return tuple(Tag(scheme.get(place, OUTSIDE), name) for place, _, name in parts)
    return None


def entities_of(tags: Sequence[Tag]) -> "list[slice]":
    """Return the tokens of each entity, and those between entities, in the order of the text."""
    starts = [index for index, tag in enumerate(tags) if index == 0 or not tag.continues(tags[index - 1])]
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(tags)])]


@dataclass(frozen=True)
class Span:
    """Entity in a text: its tokens, and its characters without spaces around them."""

    type: str
    tokens: slice
    start: int
    end: int


def spans_of(text: str, tags: Sequence[Tag], offsets: "Sequence[tuple[int, int]]") -> "list[Span]":
    """Return the entities of a text in its order. `offsets`: characters of each token; tokens may share one.

    Entities without characters are left out. Of those that share a character the first is kept; the longest of those
    that begin with it.
    """
    found = []
    for tokens in entities_of(tags):
        first = tags[tokens.start]
        start, end = offsets[tokens.start][0], offsets[tokens.stop - 1][1]
        part = text[start:end]
        if first.place != OUTSIDE and part.strip():
            found.append(Span(first.type, tokens, end - len(part.lstrip()), start + len(part.rstrip())))
    spans: "list[Span]" = []
    for span in sorted(found, key=lambda one: (one.start, -one.end, one.type)):
        if not spans or span.start >= spans[-1].end:
            spans.append(span)
    return spans


class TagDecoder:
    """Choose the likeliest tags that follow each other as their scheme allows, by Viterbi's algorithm."""

    def __init__(self, tags: Sequence[Tag], biases: Mapping[str, float]) -> None:
        """`biases`: added to the score of two tags in a row, by the names of `BIASES`; 0 for those that are missing."""
        self._follow = np.array([[_score(before, tag, biases) for before in tags] for tag in tags], np.float32)
        self._start = np.array([_allowed(tag.place in (OUTSIDE, FIRST, ONLY)) for tag in tags], np.float32)
        self._end = np.array([_allowed(tag.place in CLOSED) for tag in tags], np.float32)

    def __call__(self, scores: np.ndarray) -> "list[int]":
        """Return the tag of each token. `scores`: logarithms of probabilities (tokens, tags)."""
        if not len(scores):
            return []
        total, before = scores[0] + self._start, []
        for own in scores[1:]:
            paths = self._follow + total  # (tag, tag before)
            before.append(paths.argmax(axis=1))
            total = paths.max(axis=1) + own
        path = [int((total + self._end).argmax())]
        for best in reversed(before):
            path.append(int(best[path[-1]]))
        return path[::-1]


def _score(before: Tag, tag: Tag, biases: Mapping[str, float]) -> float:
    """Return the bias of `tag` after `before`."""
    for name, (places, next_places) in BIASES.items():
        if before.place in places and tag.place in next_places:
            return biases.get(name, 0.0) if before.place in CLOSED or tag.continues(before) else FORBIDDEN
    return FORBIDDEN


def _allowed(is_allowed: bool) -> float:
    return 0.0 if is_allowed else FORBIDDEN
