"""Join what was found in the windows of a text, which share words, to one answer."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from .filling import chosen_classes
from .schemas import CLASSIFICATION, ENTITIES, RELATION, Part


def join(schema: "Sequence[Part]", windows: "Sequence[dict[str, Any]]") -> "dict[str, Any]":
    """Return the answer of a text from those of its windows, which share words.

    Of entities of one type that overlap, and of classes, the best score counts; equal relations and instances are one.
    """
    if len(windows) == 1:
        return windows[0]
    answer: "dict[str, Any]" = {"entities": [], "classifications": {}, "relations": [], "structures": {}}
    for part in schema:
        if part.kind == ENTITIES:
            answer["entities"] = _best(part, [one for window in windows for one in window["entities"]])
        elif part.kind == CLASSIFICATION:
            found = [one for window in windows for one in window["classifications"][part.name]]
            best = {one["label"]: one for one in sorted(found, key=_score)}
            classes = sorted(best.values(), key=_score, reverse=True)
            answer["classifications"][part.name] = chosen_classes(part, classes)
        elif part.kind == RELATION:
            answer["relations"] += _different(
                one for window in windows for one in window["relations"] if one["label"] == part.name
            )
        else:
            found = [one for window in windows for one in window["structures"][part.name]]
            answer["structures"][part.name] = _different(found)
    return answer


def _best(part: Part, found: "Sequence[dict[str, Any]]") -> "list[dict[str, Any]]":
    """Return the best entities of each type that do not overlap, by their start, or the best of them."""
    only_best = {label.name for label in part.labels if label.only_best}
    kept: "dict[str, list[tuple[int, int, dict[str, Any]]]]" = {label.name: [] for label in part.labels}  # by start
    for one in sorted(found, key=_score, reverse=True):
        own, start, end = kept[one["label"]], one["start"], one["end"]
        place = bisect_left(own, (start,))
        neighbours = own[max(place - 1, 0) : place + 1]
        if own and one["label"] in only_best:
            continue
        if not any(start < other_end and other_start < end for other_start, other_end, _ in neighbours):
            own.insert(place, (start, end, one))
    return sorted((one for own in kept.values() for *_, one in own), key=lambda one: int(one["start"]))


def _different(found: "Iterable[dict[str, Any]]") -> "list[dict[str, Any]]":
    """Return relations or instances that differ in more than their scores; of others the one with the best score."""
    kept: "dict[str, dict[str, Any]]" = {}
    for one in found:
        key = json.dumps(_without_scores(one))
        if key not in kept or _score(one) > _score(kept[key]):
            kept[key] = one
    return list(kept.values())


def _without_scores(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_scores(one) for one in value]
    if isinstance(value, dict):
        return {name: _without_scores(one) for name, one in value.items() if not isinstance(one, float)}
    return value


def _score(value: Any) -> float:
    """Return the score of what was found, or the best in a relation or an instance."""
    if isinstance(value, float):
        return value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max(map(_score, parts), default=0.0)
