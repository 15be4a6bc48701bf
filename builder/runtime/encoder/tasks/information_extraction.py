"""Fill the schema of a request from a text: entities, classes, relations and structures.

The prompt, scores and choice of spans are those of the gliner2 package, 2.1.0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding

from ...contract import EncoderServing
from ...fields import Field, InputError, Tensors, as_bytes, one_each, option, strings
from .. import task
from ..filling import fill
from ..joining import join
from ..schemas import THRESHOLD, entity_types, lay_out, read_schema
from ..text import TextEncoder
from ..words import end_of_window, places_of_words, shared_words, words_with_marks

OUTPUTS = ("entities", "classifications", "relations", "structures")
MARKERS = ("labels", "fields", "choices", "prompts")  # inputs of the graph that are lists of a Layout
ENDS = (".", "!", "?")  # of a text; another one gets the first


@dataclass
class WordRow(task.Row):
    """Row of a text, or of a part of it. `words`: those of the text that it has."""

    words: range = range(0)


class Task(task.Task):
    offsets = split_words = takes_windows = True

    def __init__(self, serving: EncoderServing, text: TextEncoder, folder: Path) -> None:
        super().__init__(serving, text, folder)
        words_with_marks("")  # makes the pattern, for which the first request would wait

    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (
            Field("text_input", "TYPE_STRING"),
            Field("labels", "TYPE_STRING", (-1,), optional=True),
            Field("schema", "TYPE_STRING", optional=True),
            Field("threshold", "TYPE_FP32", optional=True),
            Field("windows", "TYPE_BOOL", optional=True),
        )

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return tuple(Field(name, "TYPE_STRING") for name in OUTPUTS)

    def read(self, tensors: Tensors) -> task.EncodingJob:
        texts, given = one_each(tensors, "text_input"), [name for name in ("labels", "schema") if name in tensors]
        if len(given) != 1:
            raise InputError(
                f"the request has {' and '.join(given) or 'no labels and no schema'}; send labels (entity types), or "
                f"schema (an object with one or more of {', '.join(OUTPUTS)})"
            )
        asked = strings(tensors, given[0])
        if len(asked) != len(texts):
            raise InputError(f"{given[0]} has {len(asked)} rows and text_input {len(texts)}; send one row a text")
        if given[0] == "labels":
            schemas = [entity_types(row) for row in asked]
        else:
            schemas = [read_schema(one, f"schema, row {row}") for row, one in enumerate(one_each(tensors, "schema"))]
        threshold = float(option(tensors, "threshold", THRESHOLD))
        if not 0 <= threshold <= 1:
            raise InputError(f"threshold is {threshold}; expected a score from 0 to 1")
        sentences = [text if text.endswith(ENDS) else f"{text}{ENDS[0]}" for text in texts]
        layouts, words = [lay_out(schema) for schema in schemas], [words_with_marks(one) for one in sentences]
        options = {
            "texts": texts,
            "sentences": sentences,
            "schemas": schemas,
            "layouts": layouts,
            "words": words,
            "threshold": threshold,
            "windows": bool(option(tensors, "windows", False)),
        }
        job = task.EncodingJob([], options, self.wants_truncation(tensors))
        job.texts = [self._words(job, source, range(len(own))) for source, own in enumerate(words)]
        return job

    def _words(self, job: task.EncodingJob, source: int, words: Sequence[int]) -> list[str]:
        """Return the words that the model reads: the schema of a text, and `words` of it."""
        layout, sentence, places = (job.options[name][source] for name in ("layouts", "sentences", "words"))
        return [*layout.words, *layout.values, *(sentence[slice(*places[word])].lower() for word in words)]

    def rows(self, job: task.EncodingJob, encodings: Sequence[Encoding]) -> list[task.Row]:
        """Return one row a text or, with `windows`, one a window of a text that is too long."""
        return [row for source, encoding in enumerate(encodings) for row in self._rows_of(job, source, encoding)]

    def _rows_of(self, job: task.EncodingJob, source: int, encoding: Encoding) -> list[task.Row]:
        words = len(job.options["words"][source])
        if len(encoding) <= self.max_length:
            return [self._row(job, source, encoding, range(words))]
        if not (job.options["windows"] or job.truncate):
            raise InputError(
                f"row {source} has {len(encoding)} tokens with its schema; the limit of this model is "
                f"{self.max_length}: {self.too_long}"
            )
        prompt = len(self._words(job, source, ()))
        places = places_of_words(encoding, range(prompt, prompt + words))
        parts = [range(self._end_of_window(source, places, 0))]
        while job.options["windows"] and parts[-1].stop < words:
            start = parts[-1].stop - shared_words(len(parts[-1]), self.parameters["max_width"])
            parts.append(range(start, self._end_of_window(source, places, start)))
        self.refuse_many(sum(places[0] + places[part.stop] - places[part.start] for part in parts), len(parts))
        texts = [self._words(job, source, part) for part in parts]
        cut = not job.options["windows"]
        return [self._row(job, source, one, part, cut) for one, part in zip(self.text(texts), parts)]

    def _end_of_window(self, source: int, places: Sequence[int], start: int) -> int:
        """Return the word before which a window has to end. Raises InputError for one without a word."""
        end = end_of_window(places, start, self.max_length - places[0])
        if end <= start:
            raise InputError(
                f"row {source}: its schema takes {places[0]} tokens and its word {start + 1} "
                f"{places[start + 1] - places[start]}; this model reads {self.max_length}: send a shorter schema, its "
                "parts in several requests, or shorter words"
            )
        return end

    def _row(
        self, job: task.EncodingJob, source: int, encoding: Encoding, words: range, truncated: bool = False
    ) -> WordRow:
        layout, last = job.options["layouts"][source], len(encoding) - 1
        places = places_of_words(encoding, range(len(layout.words) + len(layout.values) + len(words)))
        feeds = {  # a last word of which the tokenizer leaves nothing has the last token
            "words": [min(place, last) for place in places[len(layout.words) : -1]],
            **{name: [places[word] for word in getattr(layout, name)] for name in MARKERS},
        }
        return WordRow(encoding, source, truncated, feeds, words)

    def answer(
        self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> dict[str, np.ndarray]:
        found: list[list[dict[str, Any]]] = [[] for _ in job.texts]
        for row, output in zip(rows, outputs):
            assert isinstance(row, WordRow)
            text, schema, layout, words = (
                job.options[name][row.source] for name in ("texts", "schemas", "layouts", "words")
            )
            own = words[row.words.start : row.words.stop]
            found[row.source].append(fill(schema, layout, text, own, output, job.options["threshold"]))
        answers = [join(schema, windows) for schema, windows in zip(job.options["schemas"], found)]
        return {
            name: as_bytes([[json.dumps(answer[name], ensure_ascii=False)] for answer in answers]) for name in OUTPUTS
        }
