"""Data for decoders: texts whose tokens are scored, questions with choices, and prompts with answers."""

from __future__ import annotations

import json
import math
import string
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from builder.checkpoints.checkpoint import Checkpoint
from builder.checkpoints.labelled.evaluation import (
    Answer,
    Comparison,
    LabelledData,
    Row,
    Sample,
    text_of,
    texts_of,
    without,
)
from builder.checkpoints.metrics import Scores, mean_scores, score_questions
from builder.common.errors import SpecError

ANSWER_TOKENS = 128  # of an answer, if its row has no max_tokens
OPTIONS = {"max_tokens": "max_tokens", "stop": "stop_words", "until": "stop_words"}  # key of a row -> request option
TOKEN_SCORES = "prompt_logprobs_output"
OF_TEXTS = ("perplexity", "bits per byte")  # names of measures
OF_CHOICES = ("accuracy", "accuracy, by length")
OF_ANSWERS = ("exact match", "F1")


def scored_texts(checkpoint: Checkpoint, rows: Sequence[Row], keys: Sequence[str]) -> LabelledData:
    """Return the data of texts, each token of which is scored once.

    A text longer than the context is scored in pieces, each after the last token of the one before it, as lm-eval's
    loglikelihood_rolling does (lm_eval/utils.py, get_rolling_token_windows, 0.4).
    """
    (key,) = keys
    texts = [str(row[key]) for row in rows if text_of(row, key).strip()]
    if not texts:
        raise SpecError(f"none of {len(rows)} rows has a text")
    before = _before_texts(checkpoint)
    pieces = [list(_pieces([*before, *_tokens(checkpoint, text)], _longest(checkpoint))) for text in texts]

    def items(answers: Sequence[Answer]) -> list[tuple[float, int, int]]:
        each = iter(answers)
        logprobs = [np.concatenate([_logprobs(next(each)) for _ in own]) for own in pieces]
        return [(float(v.sum()), len(v), len(text.encode())) for v, text in zip(logprobs, texts, strict=True)]

    samples = [_scored(piece) for own in pieces for piece in own]
    note = without(len(rows) - len(texts), "rows without a text")
    return LabelledData("texts", f"{len(texts)} texts", samples, items, _score_texts, OF_TEXTS, note)


def _pieces(tokens: Sequence[int], longest: int) -> Iterator[Sequence[int]]:
    for start in range(0, max(1, len(tokens) - 1), longest - 1):
        yield tokens[start : start + longest]


def _score_texts(items: Sequence[tuple[float, int, int]]) -> Scores:
    """Score (sum of log-probabilities, tokens, bytes) of each text."""
    total, tokens, size = (sum(column) for column in zip(*items, strict=True))
    return dict(zip(OF_TEXTS, (math.exp(-total / max(1, tokens)), -total / math.log(2) / size), strict=True))


def choices(checkpoint: Checkpoint, rows: Sequence[Row], keys: Sequence[str]) -> LabelledData:
    """Return the data of questions with choices, of which the most probable after its question is the answer.

    As in lm-eval, a choice follows a space, its tokens are those that the question alone does not have, and a question
    that is too long loses its beginning (lm_eval/api/model.py, _encode_pair; models/huggingface.py, 0.4). Raises
    SpecError for an empty choice, whose tokens cannot be told from the question's.
    """
    question, options, right = keys
    first = _first_tokens(checkpoint)
    samples: list[Sample] = []
    questions: list[tuple[int, Sequence[str], list[int]]] = []
    for number, row in enumerate(rows, 1):
        listed = row[options].get("text") if isinstance(row[options], dict) else row[options]
        texts = texts_of(listed, options)
        if isinstance(listed, list) and len(texts) < len(listed):
            raise SpecError(f"row {number}: {options} has an empty text; write it out or leave the row out")
        asked = text_of(row, question).rstrip()
        context = _tokens(checkpoint, asked)
        before = first if first or context else _before_texts(checkpoint)
        whole = [[*before, *_tokens(checkpoint, f"{asked} {text}")] for text in texts]
        counts = [len(tokens) - len(before) - len(context) for tokens in whole]
        questions.append((_place(row, options, right, texts, number), texts, counts))
        samples += [_scored(tokens[-_longest(checkpoint) :]) for tokens in whole]

    def items(answers: Sequence[Answer]) -> list[tuple[int, list[float], list[float]]]:
        each = iter(answers)
        found = []
        for place, texts, counts in questions:
            sums = [float(_logprobs(next(each))[-max(1, count) :].sum()) for count in counts]
            found.append((place, sums, [value / len(text) for value, text in zip(sums, texts, strict=True)]))
        return found

    return LabelledData("questions with choices", f"{len(rows)} questions", samples, items, _score_choices, OF_CHOICES)


def _place(row: Row, options: str, key: str, texts: Sequence[str], number: int) -> int:
    """Return the place of the right choice: its label, a number from 0 on, its text, or a letter. Raises SpecError."""
    names = row[options].get("label", []) if isinstance(row[options], dict) else []
    right, places = str(row[key]), [str(place) for place in range(len(texts))]
    spellings = [places, texts] if isinstance(row[key], int) else [texts, places]
    for known in ([str(name) for name in names], *spellings, list(string.ascii_uppercase[: len(texts)])):
        if right in known:
            return known.index(right)
    raise SpecError(f"row {number}: {key} is {right[:80]!r}, and {options} has {len(texts)} texts, none of them it")


def _score_choices(items: Sequence[tuple[int, list[float], list[float]]]) -> Scores:
    """Score (place of the right choice, log-probability of each, the same by its characters) of each question."""
    right, sums, by_length = zip(*items, strict=True)
    return dict(zip(OF_CHOICES, (_share(right, sums), _share(right, by_length)), strict=True))


def _share(right: Sequence[int], scores: Sequence[Sequence[float]]) -> float:
    return float(np.mean([place == int(np.argmax(one)) for place, one in zip(right, scores, strict=True)]))


def prompts(checkpoint: Checkpoint, rows: Sequence[Row], keys: Sequence[str]) -> LabelledData:
    """Return the data of prompts, or chats, with their right answers, which are compared as SQuAD compares them."""
    prompt, answer = keys
    if any("context" in row for row in rows):
        raise SpecError(
            f"rows have a context beside the {prompt}; write it into the {prompt}, as the model is to read it"
        )
    samples: list[Sample] = []
    for row in rows:
        is_chat = not isinstance(row[prompt], str)
        asked = {"messages": json.dumps(row[prompt])} if is_chat else {"text_input": text_of(row, prompt)}
        options = {option: row[key] for key, option in OPTIONS.items() if row.get(key) is not None}
        samples.append({**asked, "temperature": 0.0, "max_tokens": ANSWER_TOKENS, **options})
    right = [texts_of(row[answer], answer) for row in rows]

    def items(answers: Sequence[Answer]) -> list[Scores]:
        scores = (score_questions([texts], [written_text(one)]) for texts, one in zip(right, answers, strict=True))
        return [{name: one[name] for name in OF_ANSWERS} for one in scores]

    return LabelledData("prompts with answers", f"{len(rows)} prompts", samples, items, mean_scores, OF_ANSWERS)


def by_tokens(checkpoint: Checkpoint) -> Comparison:
    """Return PyTorch's scores of prompts, and the share of positions with the same most probable token."""
    return Comparison(lambda sample: _token_scores(checkpoint, sample), _same_tokens, checkpoint.task.metric)


def by_texts(checkpoint: Checkpoint) -> Comparison:
    """Return PyTorch's greedy answers, and the share of equal ones."""
    return Comparison(lambda sample: _greedy(checkpoint, sample), same_text, "equal texts")


def _scored(tokens: Sequence[int]) -> Sample:
    """Return the request for the scores of `tokens`; an answer has a token at least."""
    return {"input_ids": list(tokens), "prompt_logprobs": 1, "temperature": 0.0, "max_tokens": 1}


def _logprobs(answer: Answer) -> np.ndarray:
    """Return the log-probability of each token of a prompt but the first, which has none: (tokens - 1,)."""
    return np.array([token["logprob"] for token in json.loads(answer[TOKEN_SCORES])[1:]], np.float64)


def _token_scores(checkpoint: Checkpoint, sample: Sample) -> Answer:
    """Return the scores of a prompt in the form of the served model's."""
    tokens = torch.tensor([sample["input_ids"]])
    with torch.inference_mode():
        logits = checkpoint.model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
    own = torch.log_softmax(logits, dim=-1).gather(-1, tokens[0, 1:, None])[:, 0]
    scored = zip(own.tolist(), logits.argmax(dim=-1).tolist(), strict=True)
    first: Any = {"logprob": None, "top": []}
    return {TOKEN_SCORES: json.dumps([first, *({"logprob": v, "top": [{"token": t}]} for v, t in scored)])}


def _same_tokens(expected: Answer, actual: Answer) -> float:
    best, own = (
        np.array([token["top"][0]["token"] for token in json.loads(answer[TOKEN_SCORES])[1:]])
        for answer in (expected, actual)
    )
    return float(np.mean(best == own)) if len(best) else 1.0


def _greedy(checkpoint: Checkpoint, sample: Sample) -> Answer:
    """Return `generate`'s greedy answer, which ends before a stop text."""
    tokenizer = checkpoint.tokenizer
    if "messages" in sample:
        chat = tokenizer.apply_chat_template(json.loads(sample["messages"]), add_generation_prompt=True, tokenize=False)
        tokens = tokenizer(chat, add_special_tokens=False, return_tensors="pt")
    else:
        tokens = tokenizer(sample["text_input"], return_tensors="pt")
    given = tokens["input_ids"]
    with torch.inference_mode():
        written = checkpoint.model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=sample["max_tokens"]
        )
    text = tokenizer.decode(written[0, given.shape[1] :], skip_special_tokens=True)
    stops = sample.get("stop_words", [])
    ends = [text.index(stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop in text]
    return {"text_output": [text[: min(ends)] if ends else text]}


def written_text(answer: Answer) -> str:
    return "".join(answer["text_output"]).strip()


def same_text(expected: Answer, actual: Answer) -> float:
    return float(written_text(expected) == written_text(actual))


def _longest(checkpoint: Checkpoint) -> int:
    """Return the tokens of a prompt at most: one more belongs to the answer."""
    return checkpoint.max_length - 1


def _tokens(checkpoint: Checkpoint, text: str) -> list[int]:
    return list(checkpoint.tokenizer(text, add_special_tokens=False).input_ids)


def _before_texts(checkpoint: Checkpoint) -> list[int]:
    """Return the token after which a text begins, whose own first token has a score then; none if there is none."""
    tokenizer = checkpoint.tokenizer
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    return [] if first is None else [first]


def _first_tokens(checkpoint: Checkpoint) -> list[int]:
    """Return the token that the tokenizer puts before each text, if it does."""
    first = checkpoint.tokenizer.bos_token_id
    return [first] if first is not None and list(checkpoint.tokenizer("a").input_ids[:1]) == [first] else []
