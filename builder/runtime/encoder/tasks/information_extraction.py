"""Fill the schema of a request from a text: entities, classes, relations and structures.

The prompt, scores and choice of spans are those of the gliner2 package, 2.1.0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Encoding

from ...fields import Field, InputError, Tensors, as_bytes, one_each, option, strings
from .. import task
from ..filling import fill
from ..schemas import THRESHOLD, entity_types, lay_out, read_schema
from ..words import tokens_of_words, words_with_marks

OUTPUTS = ("entities", "classifications", "relations", "structures")
MARKERS = ("labels", "fields", "choices", "prompts")  # inputs of the graph that are lists of a Layout
ENDS = (".", "!", "?")  # of a text; another one gets the first


@dataclass
class WordRow(task.Row):
    """Row of a text. `words`: how many of its own it has."""

    words: int = 0


class Task(task.Task):
    offsets = split_words = True

    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (
            Field("text_input", "TYPE_STRING"),
            Field("labels", "TYPE_STRING", (-1,), optional=True),
            Field("schema", "TYPE_STRING", optional=True),
            Field("threshold", "TYPE_FP32", optional=True),
        )

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return tuple(Field(name, "TYPE_STRING") for name in OUTPUTS)

    def read(self, tensors: Tensors) -> task.EncodingJob:
        texts, given = one_each(tensors, "text_input"), [name for name in ("labels", "schema") if name in tensors]
        if len(given) != 1:
            raise InputError(
                f"the request has {' and '.join(given) or 'no labels and no schema'}; send labels (entity types), or "
                f"schema (a JSON object with one or more of {', '.join(OUTPUTS)})"
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
        options = {"texts": texts, "schemas": schemas, "layouts": layouts, "words": words, "threshold": threshold}
        lists = [
            [*layout.words, *layout.values, *(sentence[start:end].lower() for start, end in places)]
            for layout, sentence, places in zip(layouts, sentences, words)
        ]
        return task.EncodingJob(list(lists), options, self.wants_truncation(tensors))

    def rows(self, job: task.EncodingJob, encodings: Sequence[Encoding]) -> list[task.Row]:
        return [self._row(job, source, encoding) for source, encoding in enumerate(encodings)]

    def _row(self, job: task.EncodingJob, source: int, encoding: Encoding) -> WordRow:
        layout, words = job.options["layouts"][source], len(job.options["words"][source])
        prompt, whole = len(layout.words) + len(layout.values), len(encoding)
        first = tokens_of_words(encoding, last=False)
        places = [whole]
        for word in range(prompt + words - 1, -1, -1):
            places.append(first.get(word, places[-1]))
        places.reverse()
        if whole > self.max_length:
            if not job.truncate:
                raise InputError(
                    f"row {source} has {whole} tokens with its schema; the limit of this model is {self.max_length}: "
                    f"{self.too_long}"
                )
            words = int(np.searchsorted(places[prompt + 1 :], self.max_length, side="right"))
            if not words:
                raise InputError(
                    f"row {source}: its schema takes {places[prompt]} tokens; this model reads {self.max_length}: "
                    "send a shorter schema, or its parts in several requests"
                )
            encoding.truncate(places[prompt + words])
        last = len(encoding) - 1  # stands for a last word of which the tokenizer leaves nothing
        feeds = {
            "words": [min(place, last) for place in places[len(layout.words) : prompt + words]],
            **{name: [places[word] for word in getattr(layout, name)] for name in MARKERS},
        }
        return WordRow(encoding, source, whole > len(encoding), feeds, words)

    def answer(
        self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> dict[str, np.ndarray]:
        answers = []
        for row, output in zip(rows, outputs):
            assert isinstance(row, WordRow)
            text, schema, layout, words = (
                job.options[name][row.source] for name in ("texts", "schemas", "layouts", "words")
            )
            answers.append(fill(schema, layout, text, words[: row.words], output, job.options["threshold"]))
        return {
            name: as_bytes([[json.dumps(answer[name], ensure_ascii=False)] for answer in answers]) for name in OUTPUTS
        }
