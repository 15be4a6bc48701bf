"""Find the entities of a text, with character offsets, by the aggregation strategies of the reference pipeline.

The rules are those of transformers' TokenClassificationPipeline: none, simple, first, average, max. Where labels are
tags that say where an entity ends (BIOES, BILOU), groups are entities, which the pipeline takes apart, and the strategy
viterbi finds the likeliest tags of the whole text.

A text that is longer than the model reads can be split into windows that overlap, whose scores are those of one text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import Encoding

from ...contract import EncoderServing
from ...fields import Field, Tensors, as_bytes, choice, one_each, option, strings
from .. import task
from ..scores import log_softmax, softmax
from ..tags import Tag, TagDecoder, entities_of, spans_of, tags_of
from ..text import TextEncoder
from ..windows import Window, frame, joined, split

STRATEGIES = ("none", "simple", "first", "average", "max")
VITERBI = "viterbi"
SHARED = 8  # two windows share an eighth of their tokens
Entity = dict[str, Any]


class Task(task.Task):
    offsets = takes_windows = True

    def __init__(self, serving: EncoderServing, text: TextEncoder, folder: Path) -> None:
        super().__init__(serving, text, folder)
        labels = self.parameters["labels"]
        self.tags = tags_of(labels)
        self.tag = dict(zip(labels, self.tags or map(_tag, labels)))
        self.decode = None if self.tags is None else TagDecoder(self.tags, self.parameters["transition_biases"])

    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (
            Field("text_input", "TYPE_STRING"),
            Field("aggregation_strategy", "TYPE_STRING", optional=True),
            Field("ignore_labels", "TYPE_STRING", (-1,), optional=True),
            Field("windows", "TYPE_BOOL", optional=True),
        )

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (Field("entities", "TYPE_STRING"),)

    def read(self, tensors: Tensors) -> task.EncodingJob:
        texts = one_each(tensors, "text_input")
        ignored = strings(tensors, "ignore_labels") if "ignore_labels" in tensors else [["O"]]
        options = {
            "strategy": choice(tensors, "aggregation_strategy", "none", self._strategies),
            "ignored": {label for row in ignored for label in row},
            "windows": bool(option(tensors, "windows", False)),
        }
        return task.EncodingJob(list(texts), options, self.wants_truncation(tensors))

    @property
    def _strategies(self) -> tuple[str, ...]:
        return STRATEGIES if self.tags is None else (*STRATEGIES, VITERBI)

    def rows(self, job: task.EncodingJob, encodings: Sequence[Encoding]) -> list[task.Row]:
        """Return one row a text or, with `windows`, one a window of a text that is too long."""
        if not job.options["windows"]:
            return super().rows(job, encodings)
        job.options["encodings"] = encodings
        return [row for source, encoding in enumerate(encodings) for row in self._windows(source, encoding)]

    def _windows(self, source: int, encoding: Encoding) -> list[task.Row]:
        if len(encoding) <= self.max_length:
            return [task.Row(encoding, source)]
        first, last = frame(encoding, 0)
        size = self.max_length - len(encoding) + last - first
        windows = split(encoding, 0, size, size // SHARED)
        return [task.Row(cast(Encoding, window), source) for window in windows]

    def answer(
        self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> dict[str, np.ndarray]:
        encodings: list[list[Encoding]] = [[] for _ in job.texts]
        scores: list[list[np.ndarray]] = [[] for _ in job.texts]
        for row, output in zip(rows, outputs):
            encodings[row.source].append(row.encoding)
            scores[row.source].append(output["logits"][: len(row.encoding), : len(self.parameters["labels"])])
        answers = []
        for source, text in enumerate(job.texts):
            encoding, logits = encodings[source][0], scores[source][0]
            if len(encodings[source]) > 1:
                windows = cast("list[Window]", encodings[source])
                encoding = job.options["encodings"][source]
                logits = joined(encoding, windows, scores[source])
            entities = self._entities(str(text), encoding, logits, job.options["strategy"])
            reported = [e for e in entities if e.get("entity", e.get("entity_group")) not in job.options["ignored"]]
            answers.append([json.dumps(reported, ensure_ascii=False)])
        return {"entities": as_bytes(answers)}

    def _entities(self, text: str, encoding: Encoding, logits: np.ndarray, strategy: str) -> list[Entity]:
        if strategy == VITERBI:
            return self._likeliest(text, encoding, logits)
        return self._aggregate(self._tokens(text, encoding, softmax(logits)), strategy)

    def _tokens(self, text: str, encoding: Encoding, scores: np.ndarray) -> list[Entity]:
        """Return the tokens that are not special, each with its scores, offsets and True if it continues a word."""
        tokens = []
        details = zip(encoding.ids, encoding.offsets, encoding.special_tokens_mask)
        for index, (token_id, (start, end), special) in enumerate(details):
            if special:
                continue
            word = str(self.text.tokenizer.id_to_token(token_id))  # without the spaces that an added token may swallow
            if self.parameters["word_aware"]:
                subword = len(word) != len(text[start:end])
            else:
                subword = start > 0 and " " not in text[start - 1 : start + 1]
            if token_id == self.parameters["unk_id"]:
                word, subword = text[start:end], False
            tokens.append(
                {"scores": scores[index], "index": index, "word": word, "start": start, "end": end, "subword": subword}
            )
        return tokens

    def _aggregate(self, tokens: list[Entity], strategy: str) -> list[Entity]:
        if strategy in ("none", "simple"):
            entities = [self._labelled(token, token["scores"], index=token["index"]) for token in tokens]
        else:
            entities = [self._word(group, strategy) for group in _words(tokens)]
        return entities if strategy == "none" else self._groups(entities)

    def _labelled(self, span: Entity, scores: np.ndarray, **more: Any) -> Entity:
        best = int(scores.argmax())
        return {
            "entity": self.parameters["labels"][best],
            "score": float(scores[best]),
            **more,
            "word": span["word"],
            "start": span["start"],
            "end": span["end"],
        }

    def _word(self, tokens: list[Entity], strategy: str) -> Entity:
        """Join one word's tokens; the strategy decides which token's scores count."""
        if strategy == "first":
            scores = tokens[0]["scores"]
        elif strategy == "max":
            scores = max(tokens, key=lambda token: token["scores"].max())["scores"]
        else:
            scores = np.mean([token["scores"] for token in tokens], axis=0)
        word = self.text.to_string([token["word"] for token in tokens])
        return self._labelled({"word": word, "start": tokens[0]["start"], "end": tokens[-1]["end"]}, scores)

    def _groups(self, entities: list[Entity]) -> list[Entity]:
        """Join neighbours of one entity, and those outside of entities."""
        groups = [entities[part] for part in entities_of([self.tag[entity["entity"]] for entity in entities])]
        return [
            {
                "entity_group": group[0]["entity"].split("-", 1)[-1],
                "score": float(np.mean([entity["score"] for entity in group])),
                "word": self.text.to_string([entity["word"] for entity in group]),
                "start": group[0]["start"],
                "end": group[-1]["end"],
            }
            for group in groups
        ]

    def _likeliest(self, text: str, encoding: Encoding, logits: np.ndarray) -> list[Entity]:
        """Return the entities of the likeliest tags, each with the mean probability of its tags."""
        assert self.tags is not None
        assert self.decode is not None
        own = [index for index, special in enumerate(encoding.special_tokens_mask) if not special]
        scores, offsets = log_softmax(logits[own]), encoding.offsets  # read once: an encoding copies what is read
        path = self.decode(scores)
        likely = np.exp(scores[np.arange(len(path)), path])
        return [
            {
                "entity_group": span.type,
                "score": float(likely[span.tokens].mean()),
                "word": text[span.start : span.end],
                "start": span.start,
                "end": span.end,
            }
            for span in spans_of(text, [self.tags[tag] for tag in path], [offsets[index] for index in own])
        ]


def _words(tokens: list[Entity]) -> list[list[Entity]]:
    words: list[list[Entity]] = []
    for token in tokens:
        if words and token["subword"]:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def _tag(label: str) -> Tag:
    """Return the tag that the reference pipeline sees in a label: what does not begin with B- is inside an entity."""
    return Tag(label[0], label[2:]) if label.startswith(("B-", "I-")) else Tag("I", label)
