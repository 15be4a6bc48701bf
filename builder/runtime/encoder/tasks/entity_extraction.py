"""Find the entities of a text by the labels that the request names.

A text that is longer than the model reads can be split into windows that overlap, of which the best spans are answered.

The prompt, scores and choice of spans are those of the gliner package, 0.2.29.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import Encoding

from ...fields import Field, InputError, Tensors, as_bytes, one_each, option, strings
from .. import task
from ..scores import sigmoid
from ..spans import Spans, join, spans_above, spans_of_words, without_overlaps
from ..words import end_of_window, places_of_words, shared_words, tokens_of_words, words_of

THRESHOLD = 0.5
DECODERS = {"markerV0": spans_above, "token_level": spans_of_words}


@dataclass
class Window(task.Row):
    """Row of a text, or of a part of it. `words`: those that the row's scores are of, by their number in the text."""

    words: list[int] = field(default_factory=list)


class Task(task.Task):
    offsets = split_words = takes_windows = True

    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (
            Field("text_input", "TYPE_STRING"),
            Field("labels", "TYPE_STRING", (-1,)),
            Field("threshold", "TYPE_FP32", optional=True),
            Field("flat_ner", "TYPE_BOOL", optional=True),
            Field("multi_label", "TYPE_BOOL", optional=True),
            Field("windows", "TYPE_BOOL", optional=True),
        )

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (Field("entities", "TYPE_STRING"),)

    def read(self, tensors: Tensors) -> task.EncodingJob:
        texts, labels = one_each(tensors, "text_input"), strings(tensors, "labels")
        if len(labels) != len(texts):
            raise InputError(f"labels has {len(labels)} rows and text_input {len(texts)}; send one row a text")
        threshold = float(option(tensors, "threshold", THRESHOLD))
        if not 0 <= threshold <= 1:
            raise InputError(f"threshold is {threshold}; expected a score from 0 to 1")
        words = [words_of(text) for text in texts]
        options = {
            "texts": texts,
            "labels": [list(dict.fromkeys(row)) for row in labels],
            "words": words,
            "threshold": threshold,
            "flat": bool(option(tensors, "flat_ner", True)),
            "multi_label": bool(option(tensors, "multi_label", False)),
            "windows": bool(option(tensors, "windows", False)),
        }
        job = task.EncodingJob([], options, self.wants_truncation(tensors))
        job.texts = [self._words(job, source, range(len(own))) for source, own in enumerate(words)]
        return job

    def _words(self, job: task.EncodingJob, source: int, words: Sequence[int]) -> list[str]:
        """Return the words that the model reads: the labels of a text, each after a marker, and `words` of it."""
        text, places = job.options["texts"][source], job.options["words"][source]
        marked = [part for label in job.options["labels"][source] for part in (self.parameters["label_marker"], label)]
        return [*marked, self.parameters["separator"], *(text[slice(*places[word])] for word in words)]

    def rows(self, job: task.EncodingJob, encodings: Sequence[Encoding]) -> list[task.Row]:
        """Return one row a text or, with `windows`, one a window of a text that is too long."""
        return [row for source, encoding in enumerate(encodings) for row in self._rows_of(job, source, encoding)]

    def _rows_of(self, job: task.EncodingJob, source: int, encoding: Encoding) -> list[task.Row]:
        words, prompt = len(job.options["words"][source]), 2 * len(job.options["labels"][source]) + 1
        places = places_of_words(encoding, range(prompt, prompt + words))
        around = len(encoding) - (places[-1] - places[0])
        end = self._end_of_window(source, around, places, 0)
        if end == words:
            return [self._window(job, source, encoding, range(words))]
        if not (job.options["windows"] or job.truncate):
            raise InputError(
                f"row {source} has {words} words and, with its labels, {len(encoding)} tokens; the limit of this model "
                f"is {self.parameters['max_words']} words and {self.max_length} tokens: {self.too_long}"
            )
        parts = [range(end)]
        while job.options["windows"] and parts[-1].stop < words:
            start = parts[-1].stop - shared_words(len(parts[-1]), self.parameters["max_width"])
            parts.append(range(start, self._end_of_window(source, around, places, start)))
        self.refuse_many(sum(around + places[part.stop] - places[part.start] for part in parts), len(parts))
        texts = [self._words(job, source, part) for part in parts]
        cut = not job.options["windows"]
        return [self._window(job, source, one, part, cut) for one, part in zip(self.text(texts), parts)]

    def _end_of_window(self, source: int, around: int, places: Sequence[int], start: int) -> int:
        """Return the word before which a window from the word `start` on has to end. Raises InputError for none.

        `around`: tokens of a window beside those of its words.
        """
        end = min(end_of_window(places, start, self.max_length - around), start + self.parameters["max_words"])
        if end <= start:
            needed = places[start + 1] - places[start]
            raise InputError(
                f"row {source}: its labels take {around} tokens and its word {start + 1} {needed}; this model reads "
                f"{self.max_length}: send fewer labels, each with texts of its own, or shorter words"
            )
        return end

    def _window(
        self, job: task.EncodingJob, source: int, encoding: Encoding, words: Sequence[int], truncated: bool = False
    ) -> Window:
        places = tokens_of_words(encoding, self.parameters["pooling"] == "last")
        labels, shift = len(job.options["labels"][source]), 0 if self.parameters["embeds_marker"] else 1
        written = [place for place in range(len(words)) if 2 * labels + 1 + place in places]
        if not written:
            raise InputError(f"text_input, row {source}, has no tokens: the tokenizer drops its characters")
        feeds = {
            "words": [places[2 * labels + 1 + place] for place in written],
            "labels": [places[2 * label] + shift for label in range(labels)],
        }
        return Window(encoding, source, truncated, feeds, [words[place] for place in written])

    def answer(
        self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> dict[str, np.ndarray]:
        found: list[list[Spans]] = [[] for _ in job.texts]
        decode = DECODERS[self.parameters["scores"]]
        widths = () if decode is spans_of_words else (slice(None),)
        for row, output in zip(rows, outputs):
            assert isinstance(row, Window)
            places = (slice(len(row.words)), *widths, slice(len(row.feeds["labels"])))
            scores = sigmoid(output["logits"][places])
            found[row.source].append(decode(scores, job.options["threshold"]).placed(row.words))
        answers = [self._entities(job, source, join(spans)) for source, spans in enumerate(found)]
        return {"entities": as_bytes([[json.dumps(entities, ensure_ascii=False)] for entities in answers])}

    def _entities(self, job: task.EncodingJob, source: int, spans: Spans) -> list[dict[str, Any]]:
        """Return the best entities of a text, with their places in it in characters."""
        best = without_overlaps(spans, job.options["flat"], job.options["multi_label"])
        text, words, labels = (job.options[name][source] for name in ("texts", "words", "labels"))
        entities = []
        for first, last, label, score in zip(
            *(part.tolist() for part in (best.first, best.last, best.label, best.score))
        ):
            start, end = words[first][0], words[last][1]
            entities.append(
                {"start": start, "end": end, "text": text[start:end], "label": labels[label], "score": score}
            )
        return entities
