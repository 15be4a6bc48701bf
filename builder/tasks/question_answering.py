"""Spans of a context that answer a question."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from builder.errors import CheckpointError
from builder.samples import TEXTS
from builder.tasks.base import Answer, EncoderTask, Sample, TaskGraph
from builder.verify.metrics import questions

if TYPE_CHECKING:
    from builder.checkpoint.resolve import Checkpoint


class QuestionAnswering(EncoderTask):
    name = "question-answering"
    head = "question-answering"
    precedence = 1
    longest = 384  # tokens of a window: transformers' pipeline up to 4.57, and what such models are trained with
    metric = "answer agreement"
    threshold = 0.99
    labels = ("answers",)
    samples = tuple(
        {"question": question, "context": " ".join(TEXTS[i : i + 4])}
        for i, question in enumerate(
            ["Who is it about?", "What happened?", "When did it happen?", "Where was it?", "How many were there?"] * 6
        )
    )

    def graph(self, checkpoint: Checkpoint, inputs: Sequence[str]) -> TaskGraph:
        return TaskGraph(checkpoint.model, inputs, ("start_logits", "end_logits"))

    def parameters(self, checkpoint: Checkpoint) -> dict[str, Any]:
        tokenizer = checkpoint.tokenizer
        if tokenizer.padding_side == "left":
            raise CheckpointError(
                f"the tokenizer of {checkpoint.source} pads on the left: question-answering would read the context "
                "before the question, which is not supported"
            )
        return {"cls_id": tokenizer.cls_token_id, "special_tokens": tokenizer.num_special_tokens_to_add(pair=True)}

    def reference(self, checkpoint: Checkpoint, sample: Sample) -> Answer:
        """The best span of the model's own logits. transformers 5 has no pipeline for this task.

        Written apart from the emitted code, and only for contexts that fit one window: the windows, n-best and
        unanswerable questions are compared with the last pipeline's golden answers in the tests.
        """
        encoded = checkpoint.tokenizer(
            sample["question"], sample["context"], return_tensors="pt", return_offsets_mapping=True
        )
        offsets = encoded.pop("offset_mapping")[0].tolist()
        with torch.no_grad():
            output = checkpoint.model(**encoded)
        context = [i for i, sequence in enumerate(encoded.sequence_ids(0)) if sequence == 1]
        cls_id = checkpoint.tokenizer.cls_token_id
        ids = encoded["input_ids"][0].tolist()
        softened = [i for i, t in enumerate(ids) if t == cls_id and i not in context] + context
        starts, ends = (
            torch.softmax(logits[0, softened], dim=-1) for logits in (output.start_logits, output.end_logits)
        )
        start, end = starts[-len(context) :].numpy(), ends[-len(context) :].numpy()
        scores = np.tril(np.triu(np.outer(start, end)), 14)
        merged: dict[str, dict[str, Any]] = {}
        for flat in np.argsort(-scores, axis=None)[:12]:  # as many as the last pipeline looks at for one answer
            first, last = (context[i] for i in np.unravel_index(flat, scores.shape))
            words = encoded.token_to_word(0, first), encoded.token_to_word(0, last)
            if None in words:
                begin, stop = offsets[first][0], offsets[last][1]
            else:
                begin = encoded.word_to_chars(0, words[0], 1).start
                stop = encoded.word_to_chars(0, words[1], 1).end
            text = sample["context"][begin:stop]
            span = merged.setdefault(text.lower(), {"answer": text, "start": begin, "end": stop, "score": 0.0})
            span["score"] += float(scores.flat[flat])
        answers = list(merged.values())
        if sample.get("handle_impossible_answer"):
            answers.append({"answer": "", "start": 0, "end": 0, "score": float(starts[0] * ends[0])})
        return max(answers, key=lambda span: span["score"])

    def agreement(self, expected: Answer, actual: Answer) -> float:
        return float(expected["answer"] == actual["answer"])

    def score(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, float]:
        """`answers`: the texts that are right; none where the context has no answer."""
        return questions([sample["answers"] for sample in samples], [str(answer["answer"]) for answer in answers])


TASK = QuestionAnswering()
