"""Find the entities of a text, with character offsets, by the aggregation strategies of the reference pipeline.

The rules are those of transformers' TokenClassificationPipeline: none, simple, first, average, max.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Encoding

from ...fields import Field, Tensors, as_bytes, choice, one_each, strings
from .. import task
from ..scores import softmax

STRATEGIES = ("none", "simple", "first", "average", "max")
Entity = dict[str, Any]


class Task(task.Task):
    offsets = True

    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (
            Field("text_input", "TYPE_STRING"),
            Field("aggregation_strategy", "TYPE_STRING", optional=True),
            Field("ignore_labels", "TYPE_STRING", (-1,), optional=True),
        )

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (Field("entities", "TYPE_STRING"),)

    def read(self, tensors: Tensors) -> task.EncodingJob:
        texts = one_each(tensors, "text_input")
        ignored = strings(tensors, "ignore_labels") if "ignore_labels" in tensors else [["O"]]
        options = {
            "strategy": choice(tensors, "aggregation_strategy", "none", STRATEGIES),
            "ignored": {label for row in ignored for label in row},
        }
        return task.EncodingJob(list(texts), options, self.wants_truncation(tensors))

    def answer(
        self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> dict[str, np.ndarray]:
        answers = []
        for row, output in zip(rows, outputs):
            scores = softmax(output["logits"][: len(row.encoding)])
            tokens = self._tokens(str(job.texts[row.source]), row.encoding, scores)
            entities = self._aggregate(tokens, job.options["strategy"])
            reported = [e for e in entities if e.get("entity", e.get("entity_group")) not in job.options["ignored"]]
            answers.append([json.dumps(reported, ensure_ascii=False)])
        return {"entities": as_bytes(answers)}

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
        """Join neighbours with the same label; a B- label starts a new group."""
        groups: list[list[Entity]] = []
        for entity in entities:
            begins, tag = _tag(entity["entity"])
            if groups and not begins and tag == _tag(groups[-1][-1]["entity"])[1]:
                groups[-1].append(entity)
            else:
                groups.append([entity])
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


def _words(tokens: list[Entity]) -> list[list[Entity]]:
    words: list[list[Entity]] = []
    for token in tokens:
        if words and token["subword"]:
            words[-1].append(token)
        else:
            words.append([token])
    return words


def _tag(label: str) -> tuple[bool, str]:
    """Return (True if the label begins an entity, its name without B- or I-)."""
    return label.startswith("B-"), label[2:] if label.startswith(("B-", "I-")) else label
