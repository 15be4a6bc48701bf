"""Entities of one text, computed as the gliner package does: the reference of served answers.

Sources: gliner 0.2.29, data_processing/processor.py (prepare_inputs), data_processing/tokenizer.py
(WhitespaceTokenSplitter), decoding/decoder.py (SpanDecoder, TokenDecoder).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.gliner.layers import GlinerHead
from builder.checkpoints.gliner.settings import SPANS, GlinerSettings

WORD = re.compile(r"\w+(?:[-_]\w+)*|\S")


class _Found(NamedTuple):
    """Spans of words: their scores, first and last words, and labels, (spans) each."""

    score: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    label: torch.Tensor


def predict_entities(
    checkpoint: Checkpoint,
    head: GlinerHead,
    text: str,
    labels: Sequence[str],
    threshold: float = 0.5,
    flat_ner: bool = True,
    multi_label: bool = False,
) -> list[dict[str, Any]]:
    """Return the entities of `text`, by their start: {"start", "end", "text", "label", "score"}."""
    settings = checkpoint.gliner
    assert isinstance(settings, GlinerSettings)
    names = list(dict.fromkeys(labels))
    words = [match.span() for match in WORD.finditer(text)][: settings.max_words]
    prompt = [part for name in names for part in (settings.label_marker, name)] + [settings.separator]
    encoded = checkpoint.tokenizer(
        [*prompt, *(text[start:end] for start, end in words)], is_split_into_words=True, return_tensors="pt"
    )
    places = _tokens_of_words(encoded.word_ids(0), settings)
    markers = [places[2 * index] + (0 if settings.embeds_marker else 1) for index in range(len(names))]
    of_text = [index for index in range(len(words)) if len(prompt) + index in places]
    with torch.no_grad():
        features = checkpoint.model(**encoded).last_hidden_state
        tokens = torch.tensor([[places[len(prompt) + index] for index in of_text]])
        scores = head(features, tokens, torch.tensor([markers]))[0].sigmoid()
    decode = _from_spans if settings.span_mode == SPANS else _from_words
    entities = []
    for score, first, last, label in _without_overlaps(decode(scores, threshold), flat_ner, multi_label):
        start, end = words[of_text[first]][0], words[of_text[last]][1]
        entities.append({"start": start, "end": end, "text": text[start:end], "label": names[label], "score": score})
    return entities


def _tokens_of_words(word_ids: Sequence[int | None], settings: GlinerSettings) -> dict[int, int]:
    """Return the token that stands for each word; none for a word of which nothing is left."""
    places: dict[int, int] = {}
    for place, word in enumerate(word_ids):
        if word is not None and (settings.pooling == "last" or word not in places):
            places[word] = place
    return places


def _from_spans(scores: torch.Tensor, threshold: float) -> _Found:
    """Return the spans with scores (words, width, labels) above the threshold."""
    first, longer, label = torch.nonzero(scores > threshold, as_tuple=True)
    inside = first + longer < len(scores)
    first, longer, label = first[inside], longer[inside], label[inside]
    return _Found(scores[first, longer, label], first, first + longer, label)


def _from_words(scores: torch.Tensor, threshold: float) -> _Found:
    """Return the spans whose words have scores (words, labels, 3) for beginning, end and inside above the threshold."""
    begins, ends, inside = scores.unbind(dim=-1)
    found = []
    for first, label in torch.nonzero(begins > threshold).tolist():
        for last in (torch.nonzero(ends[first:, label] > threshold).flatten() + first).tolist():
            least = float(inside[first : last + 1, label].min())
            if least >= threshold:
                found.append((min(least, float(begins[first, label]), float(ends[last, label])), first, last, label))
    columns = list(zip(*found, strict=True)) or [(), (), (), ()]
    return _Found(torch.tensor(columns[0], dtype=scores.dtype), *(torch.tensor(one).long() for one in columns[1:]))


def _without_overlaps(found: _Found, flat: bool, multi_label: bool) -> list[tuple[float, int, int, int]]:
    """Return the best spans that do not overlap, by their first word; unless `flat`, one may be inside another."""
    score, first, last, label = (part[found.score.argsort(descending=True, stable=True)] for part in found)
    left, kept = torch.ones(len(score), dtype=torch.bool), []
    while left.any():
        best = int(left.nonzero()[0])
        kept.append((float(score[best]), int(first[best]), int(last[best]), int(label[best])))
        same = (first == first[best]) & (last == last[best])
        overlaps = (first <= last[best]) & (first[best] <= last)
        inside = (first <= first[best]) & (last >= last[best]) | (first[best] <= first) & (last[best] >= last)
        left &= same & multi_label | ~same & ~(overlaps & (flat | ~inside))
        left[best] = False
    return sorted(kept, key=lambda span: span[1])
