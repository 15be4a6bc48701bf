"""Spans of a context that answer a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import BatchEncoding

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.distances import PairedNumbers, paired_scores
from builder.checkpoints.metrics import score_questions
from builder.checkpoints.tasks.base import Answer, EncoderTask, Sample
from builder.common.errors import CheckpointError
from builder.common.samples import TEXTS


class QuestionAnswering(EncoderTask):
    name = "question-answering"
    head = "question-answering"
    precedence = 1
    longest = 384  # tokens of a window: transformers' pipeline up to 4.57, and what such models are trained with
    graph_outputs = ("start_logits", "end_logits")
    metric = "answer agreement"
    threshold = 0.99
    labels = ("answers",)
    samples = tuple(
        {"question": question, "context": " ".join(TEXTS[i : i + 4])}
        for i, question in enumerate(
            ["Who is it about?", "What happened?", "When did it happen?", "Where was it?", "How many were there?"] * 6
        )
    )

    def parameters(self, checkpoint: Checkpoint) -> dict[str, Any]:
        tokenizer = checkpoint.tokenizer
        if tokenizer.padding_side == "left":
            raise CheckpointError(
                f"the tokenizer of {checkpoint.source} pads on the left: question-answering would read the context "
                "before the question, which is not supported"
            )
        return {"cls_id": tokenizer.cls_token_id, "special_tokens": tokenizer.num_special_tokens_to_add(pair=True)}

    def reference(self, checkpoint: Checkpoint, sample: Sample) -> Answer:
        """Return the best span of the model's own logits. transformers 5 has no pipeline for this task.

        Written apart from the emitted code; both are compared with the last pipeline's golden answers in the tests.
        """
        windows = _windows(checkpoint, sample)
        merged: dict[str, dict[str, Any]] = {}
        empty = 1.0  # the score of no answer
        for row in range(len(windows["input_ids"])):
            scores, context, nothing = _scores(checkpoint, windows, row, int(sample.get("max_answer_len", 15)))
            empty = min(empty, nothing)
            # as many as the last pipeline considers
            for flat in np.argsort(-scores, axis=None)[: 2 * int(sample.get("top_k", 1)) + 10]:
                first, last = (context[i] for i in np.unravel_index(flat, scores.shape))
                begin, stop = _characters(windows, row, first, last)
                text = sample["context"][begin:stop]
                span = merged.setdefault(text.lower(), {"answer": text, "start": begin, "end": stop, "score": 0.0})
                span["score"] += float(scores.flat[flat])
        answers = list(merged.values())
        if sample.get("handle_impossible_answer"):
            answers.append({"answer": "", "start": 0, "end": 0, "score": empty})
        return max(answers, key=lambda span: span["score"])

    def agreement(self, expected: Answer, actual: Answer) -> float:
        return float(expected["answer"] == actual["answer"])

    def numbers(self, expected: Answer, actual: Answer) -> Mapping[str, PairedNumbers]:
        same = expected["answer"] == actual["answer"]
        return {"the score of an answer": paired_scores([expected["score"]], [actual["score"]])} if same else {}

    def score(self, samples: Sequence[Sample], answers: Sequence[Answer]) -> dict[str, float]:
        """Score against labels: `answers`, the texts that are right; none if the context has no answer."""
        return score_questions([sample["answers"] for sample in samples], [str(answer["answer"]) for answer in answers])


def _windows(checkpoint: Checkpoint, sample: Sample) -> BatchEncoding:
    """Return the question with each window of the context, a row each."""
    longest = checkpoint.max_length
    windows: BatchEncoding = checkpoint.tokenizer(
        sample["question"],
        sample["context"],
        truncation="only_second",
        max_length=longest,
        stride=int(sample.get("doc_stride", min(longest // 2, 128))),
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    return windows


def _scores(
    checkpoint: Checkpoint, windows: BatchEncoding, row: int, longest: int
) -> tuple[np.ndarray, list[int], float]:
    """Return the scores of each first and last token of the context, those tokens, and the score of no answer.

    The scores have the shape (tokens, tokens).
    """
    tokenizer = checkpoint.tokenizer
    inputs = {name: torch.tensor([windows[name][row]]) for name in tokenizer.model_input_names if name in windows}
    with torch.no_grad():
        output = checkpoint.model(**inputs)
    context = [i for i, sequence in enumerate(windows.sequence_ids(row)) if sequence == 1]
    ids = windows["input_ids"][row]
    softened = [i for i, token in enumerate(ids) if token == tokenizer.cls_token_id and i not in context] + context
    starts, ends = (torch.softmax(logits[0, softened], dim=-1) for logits in (output.start_logits, output.end_logits))
    start, end = starts[-len(context) :].numpy(), ends[-len(context) :].numpy()
    return np.tril(np.triu(np.outer(start, end)), longest - 1), context, float(starts[0] * ends[0])


def _characters(windows: BatchEncoding, row: int, first: int, last: int) -> tuple[int, int]:
    """Return where the words of tokens `first` to `last` begin and end in the context; the tokens, without words."""
    words = windows.token_to_word(row, first), windows.token_to_word(row, last)
    if None in words:
        offsets = windows["offset_mapping"][row]
        return int(offsets[first][0]), int(offsets[last][1])
    begin, end = (windows.word_to_chars(row, word, 1) for word in words)
    return int(begin.start), int(end.end)


TASK = QuestionAnswering()
