"""Predict the most probable tokens for each mask of a text, from the whole vocabulary or the request's targets.

The engine computes the language-model head only at the masks, which the input `positions` locates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Encoding

from ...fields import Field, InputError, Tensors, as_bytes, count, one_each, refuse_long, strings
from ...panics import call_tokenizer
from ...spaces import cleaned
from .. import task
from ..scores import softmax


class Task(task.Task):
    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (
            Field("text_input", "TYPE_STRING"),
            Field("top_k", "TYPE_INT32", optional=True),
            Field("targets", "TYPE_STRING", (-1,), optional=True),
        )

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (Field("predictions", "TYPE_STRING"),)

    def read(self, tensors: Tensors) -> task.EncodingJob:
        texts = one_each(tensors, "text_input")
        targets = strings(tensors, "targets") if "targets" in tensors else None
        if targets is not None and len(targets) != len(texts):
            raise InputError(f"targets has {len(targets)} rows and text_input {len(texts)}; send one row a text")
        options = {
            "top_k": count(tensors, "top_k", 5, maximum=self.limits.list_values),
            "targets": [self._target_ids(row) for row in targets] if targets else None,
        }
        return task.EncodingJob(list(texts), options, self.wants_truncation(tensors))

    def _target_ids(self, targets: list[str]) -> list[int]:
        ids = [self.text.tokenizer.token_to_id(target) for target in targets]
        unknown = [target for target, token_id in zip(targets, ids) if token_id is None]
        if unknown:
            raise InputError(
                f"targets {', '.join(map(repr, unknown))} are not single tokens of the vocabulary; "
                "send tokens as the tokeniser writes them"
            )
        return sorted({token_id for token_id in ids if token_id is not None})

    def rows(self, job: task.EncodingJob, encodings: Sequence[Encoding]) -> list[task.Row]:
        rows = super().rows(job, encodings)
        for row in rows:
            positions = [i for i, token in enumerate(row.encoding.ids) if token == self.parameters["mask_id"]]
            if not positions:
                where = "after the cut" if row.truncated else "in it"
                raise InputError(f"text_input, row {row.source}, has no {self.parameters['mask']} {where}; put one in")
            row.feeds["positions"] = positions
        predictions = job.options["top_k"] * sum(len(row.feeds["positions"]) for row in rows)
        refuse_long("predictions, top_k for each mask,", predictions, self.limits)
        return rows

    def answer(
        self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> dict[str, np.ndarray]:
        answers = []
        for row, output in zip(rows, outputs):
            allowed = job.options["targets"][row.source] if job.options["targets"] else None
            scores = softmax(output["logits"][: len(row.feeds["positions"])])
            masks = [self._mask(row, m, scores[m], job.options["top_k"], allowed) for m in range(len(scores))]
            answers.append([json.dumps(masks[0] if len(masks) == 1 else masks, ensure_ascii=False)])
        return {"predictions": as_bytes(answers)}

    def _mask(
        self, row: task.Row, mask: int, scores: np.ndarray, top_k: int, allowed: list[int] | None
    ) -> list[dict[str, Any]]:
        candidates = np.arange(len(scores)) if allowed is None else np.array(allowed)
        best = candidates[np.argsort(-scores[candidates], kind="stable")[:top_k]]
        positions = row.feeds["positions"]
        predictions = []
        for token in best.tolist():
            ids = list(row.encoding.ids)
            ids[positions[mask]] = token
            ids = [one for one in ids if one != self.parameters["pad_id"]]  # a padding token is never shown
            predictions.append(
                {
                    "score": float(scores[token]),
                    "token": token,
                    "token_str": self._decode([token], skip_special=False),
                    "sequence": self._decode(ids, skip_special=len(positions) == 1),
                }
            )
        return predictions

    def _decode(self, ids: list[int], skip_special: bool) -> str:
        text: str = call_tokenizer(self.text.tokenizer.decode, ids, skip_special_tokens=skip_special)
        return cleaned(text) if self.parameters["clean_up"] else text
