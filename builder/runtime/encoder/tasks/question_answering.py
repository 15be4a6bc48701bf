"""Find the spans of a context that answer a question, over windows if the context is long.

The rules are those of transformers' QuestionAnsweringPipeline up to 4.57 (decode_spans, unanswerable questions
as in SQuAD 2.0, arXiv:1806.03822); its golden answers are in the tests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Encoding

from ...fields import Field, InputError, Tensors, as_bytes, count, one_each, option
from .. import task
from ..scores import softmax
from ..text import Truncation

Span = dict[str, Any]


class Task(task.Task):
    offsets = True

    @staticmethod
    def inputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (
            Field("question", "TYPE_STRING"),
            Field("context", "TYPE_STRING"),
            Field("top_k", "TYPE_INT32", optional=True),
            Field("max_answer_len", "TYPE_INT32", optional=True),
            Field("doc_stride", "TYPE_INT32", optional=True),
            Field("handle_impossible_answer", "TYPE_BOOL", optional=True),
        )

    @staticmethod
    def outputs(parameters: Mapping[str, Any]) -> tuple[Field, ...]:
        return (
            Field("answer", "TYPE_STRING"),
            Field("score", "TYPE_FP32"),
            Field("start", "TYPE_INT32"),
            Field("end", "TYPE_INT32"),
            Field("answers", "TYPE_STRING"),
        )

    def read(self, tensors: Tensors) -> task.EncodingJob:
        questions, contexts = one_each(tensors, "question"), one_each(tensors, "context")
        if len(questions) != len(contexts):
            raise InputError(f"context has {len(contexts)} rows and question {len(questions)}; send one a question")
        stride = count(tensors, "doc_stride", min(self.max_length // 2, 128), minimum=0)
        limit = self.max_length - self.parameters["special_tokens"] - stride
        for row, question in enumerate(self.text(questions)):
            tokens = len(question) - sum(question.special_tokens_mask)
            if tokens >= limit:
                raise InputError(
                    f"question, row {row}, has {tokens} tokens; with doc_stride {stride} and windows of "
                    f"{self.max_length} tokens fewer than {limit} leave room for the context: shorten the question "
                    "or send a smaller doc_stride"
                )
        options = {
            "top_k": count(tensors, "top_k", 1, maximum=self.limits.list_values),
            "max_answer_len": count(tensors, "max_answer_len", 15),
            "impossible": bool(option(tensors, "handle_impossible_answer", False)),
        }
        windows = Truncation(self.max_length, "only_second", stride)
        return task.EncodingJob(list(zip(questions, contexts)), options, truncate=False, truncation=windows)

    def rows(self, job: task.EncodingJob, encodings: Sequence[Encoding]) -> list[task.Row]:
        """Return one row a window: a context is never cut, a long one becomes several overlapping rows."""
        return [
            task.Row(window, source)
            for source, encoding in enumerate(encodings)
            for window in (encoding, *encoding.overflowing)
        ]

    def answer(
        self, job: task.EncodingJob, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> dict[str, np.ndarray]:
        by_source = [self._spans(job, source, rows, outputs) for source in range(len(job.texts))]
        best = [spans[0] for spans in by_source]
        return {
            "answer": as_bytes([[span["answer"]] for span in best]),
            "score": np.array([[span["score"]] for span in best], dtype=np.float32),
            "start": np.array([[span["start"]] for span in best], dtype=np.int32),
            "end": np.array([[span["end"]] for span in best], dtype=np.int32),
            "answers": as_bytes([[json.dumps(spans, ensure_ascii=False)] for spans in by_source]),
        }

    def _spans(
        self, job: task.EncodingJob, source: int, rows: Sequence[task.Row], outputs: Sequence[task.Outputs]
    ) -> list[Span]:
        """Return the best spans over all windows of one context; the same text found twice adds its scores."""
        context = job.texts[source][1]
        spans: dict[str, Span] = {}
        null_score = 1.0
        for row, output in zip(rows, outputs):
            if row.source != source:
                continue
            candidates, null = self._window(row.encoding, output, job.options)
            null_score = min(null_score, null)
            for first, last, score in candidates:
                start, end = _characters(row.encoding, first, last)
                text = context[start:end]
                if text.lower() in spans:
                    spans[text.lower()]["score"] += score
                else:
                    spans[text.lower()] = {"score": score, "start": start, "end": end, "answer": text}
        ordered = list(spans.values())
        if job.options["impossible"] or not ordered:
            ordered.append({"score": null_score, "start": 0, "end": 0, "answer": ""})
        return sorted(ordered, key=lambda span: span["score"], reverse=True)[: job.options["top_k"]]

    def _window(
        self, encoding: Encoding, output: task.Outputs, options: Mapping[str, Any]
    ) -> tuple[list[tuple[int, int, float]], float]:
        """Return the best (first token, last token, score) of one window, and the score of 'no answer'."""
        size = len(encoding)
        ids = np.array(encoding.ids)
        allowed = np.array([sequence == 1 for sequence in encoding.sequence_ids])
        if self.parameters["cls_id"] is not None:
            allowed |= ids == self.parameters["cls_id"]
        start = softmax(np.where(allowed, output["start_logits"][:size], -10000.0))
        end = softmax(np.where(allowed, output["end_logits"][:size], -10000.0))
        null_score = float(start[0] * end[0])
        start[0] = end[0] = 0.0
        scores = np.tril(np.triu(np.outer(start, end)), options["max_answer_len"] - 1).ravel()
        limit = options["top_k"] * 2 + 10  # aligning to words makes some of them equal
        if len(scores) > limit:
            best = np.argpartition(-scores, limit)[:limit]
            best = best[np.argsort(-scores[best])]
        else:
            best = np.argsort(-scores)
        firsts, lasts = np.unravel_index(best, (size, size))
        inside = allowed[firsts] & allowed[lasts]
        candidates = zip(firsts[inside].tolist(), lasts[inside].tolist(), scores[best][inside].tolist())
        return list(candidates), null_score


def _characters(encoding: Encoding, first: int, last: int) -> tuple[int, int]:
    """Return the context offsets of the words of tokens `first` to `last`; of the tokens, if there are no words."""
    first_word, last_word = encoding.token_to_word(first), encoding.token_to_word(last)
    start = encoding.word_to_chars(first_word, 1) if first_word is not None else None
    end = encoding.word_to_chars(last_word, 1) if last_word is not None else None
    if start is None or end is None:
        return encoding.offsets[first][0], encoding.offsets[last][1]
    return start[0], end[1]
