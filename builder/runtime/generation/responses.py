"""Turn the decode loop's pieces into output tensors of a request, one by one or all together.

Knows pieces and tensors; knows no decode loop and no Triton.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Union

import numpy as np

from .options import RequestOptions
from .prompts import Prompt
from .sampling import TokenChoice
from .sequences import AnswerPiece
from .text import Spelling

Texts = dict[int, str]  # by token
Answer = Union["dict[str, np.ndarray]", Exception]
Respond = Callable[[Answer, bool], None]  # the answer, and True for the last one
Spell = Callable[[bool, "Sequence[int]"], Spelling]  # (True to leave out special tokens, the tokens before)


class AnswerWriter:
    """Sends a response for each piece of text (`options.stream`), or one when the last sequence has ended.

    `scores`: those of the prompt, complete before the first piece.
    """

    def __init__(
        self,
        spell: Spell,
        options: RequestOptions,
        prompt: Prompt,
        respond: Respond,
        scores: "list[TokenChoice] | None",
    ) -> None:
        self.spell, self.options, self.prompt, self.respond, self.scores = spell, options, prompt, respond, scores
        self.spellings = [spell(options.skip_special_tokens, prompt.tokens) for _ in range(options.n)]
        self.thinking = set(range(options.n)) if prompt.thinking else set()
        self.texts = [prompt.text if options.echo else ""] * options.n  # not sent yet, like `tokens`
        self.tokens: "list[list[TokenChoice]]" = [[] for _ in range(options.n)]
        self.last: "dict[int, AnswerPiece]" = {}

    def add(self, piece: AnswerPiece) -> None:
        self.texts[piece.index] += piece.text
        self.tokens[piece.index].extend(piece.tokens)
        if piece.finish_reason:
            self.last[piece.index] = piece
        if self.options.stream:
            self._send([piece], [len(piece.tokens)])
        elif len(self.last) == self.options.n:
            pieces = [self.last[index] for index in range(self.options.n)]
            self._send(pieces, [piece.completion_tokens for piece in pieces])

    def _send(self, pieces: "list[AnswerPiece]", counts: "list[int]") -> None:
        """Send what has come for the sequences of `pieces`; `counts`: how many tokens each of them has here."""
        indices, prompt_tokens = [piece.index for piece in pieces], self.prompt.length
        tensors = _tensors(pieces, [self.texts[index] for index in indices], prompt_tokens)
        tokens, spellings = [self.tokens[index] for index in indices], [self.spellings[index] for index in indices]
        tensors |= _logprob_tensors(tokens, spellings, self.options)
        tensors |= _count_tensors(counts, prompt_tokens, self.options)
        if all(piece.finish_reason for piece in pieces):
            tensors |= _metric_tensors(pieces, self.options)
        if self.thinking.intersection(indices):
            tensors["thinking"] = np.array([True])
        if self.scores is not None:
            tensors["prompt_logprobs_output"] = _prompt_logprobs(self.prompt, self.scores, self.options, self.spell)
            self.scores = None
        self.thinking.difference_update(indices)
        for index in indices:
            self.texts[index], self.tokens[index] = "", []
        self.respond(tensors, len(self.last) == self.options.n)


def _tensors(pieces: "list[AnswerPiece]", texts: "list[str]", prompt_tokens: int) -> "dict[str, np.ndarray]":
    """Return the output tensors: text always, counts and reasons with the last piece of a sequence."""
    tensors = {"text_output": np.array([text.encode("utf-8") for text in texts], np.object_)}
    if any(piece.index for piece in pieces) or len(pieces) > 1:
        tensors["index"] = np.array([piece.index for piece in pieces], np.int32)
    if all(piece.finish_reason for piece in pieces):
        tensors["finish_reason"] = np.array([piece.finish_reason.encode() for piece in pieces], np.object_)
        tensors["prompt_tokens"] = np.array([prompt_tokens], np.int32)
        tensors["completion_tokens"] = np.array([piece.completion_tokens for piece in pieces], np.int32)
        if all(piece.score is not None for piece in pieces):
            tensors["scores"] = np.array([piece.score for piece in pieces], np.float32)
    return tensors


def _logprob_tensors(
    tokens: "Sequence[Sequence[TokenChoice]]", spellings: "Sequence[Spelling]", options: RequestOptions
) -> "dict[str, np.ndarray]":
    """Return the log-probabilities of each sequence's tokens, if requested; `logprobs` is as in vLLM's backend."""
    written: "dict[str, Callable[[Sequence[TokenChoice], Sequence[Texts]], str]]" = {}
    if options.logprobs >= 0:
        written["logprobs_output"] = _logprobs
    if options.return_logprobs:
        written["logprobs"] = _logprobs_by_id if options.logprobs >= 0 else lambda tokens, texts: "null"
    if not written:
        return {}
    spelled = [(each, _texts(each, spelling)) for each, spelling in zip(tokens, spellings)]
    return {
        name: np.array([write(each, texts).encode("utf-8") for each, texts in spelled], np.object_)
        for name, write in written.items()
    }


def _texts(tokens: "Sequence[TokenChoice]", spelling: Spelling) -> "list[Texts]":
    """Return, for each choice, the texts of its token and of the most probable ones."""
    return [spelling([choice.token, *(token for token, _ in choice.top)]) for choice in tokens]


def _count_tensors(tokens: "list[int]", prompt_tokens: int, options: RequestOptions) -> "dict[str, np.ndarray]":
    """Count the prompt's tokens and those of this response as vLLM's backend does, if requested."""
    if not options.count_tokens:
        return {}
    return {
        "num_input_tokens": np.array([prompt_tokens], np.uint32),
        "num_output_tokens": np.array(tokens, np.uint32),
    }


def _metric_tensors(pieces: "list[AnswerPiece]", options: RequestOptions) -> "dict[str, np.ndarray]":
    """Return the measurements of an answer that has ended, if requested; they vary between runs."""
    if not options.return_perf_metrics:
        return {}
    return {
        "cached_tokens": np.array([pieces[0].cached_tokens], np.int32),
        "queue_seconds": np.array([pieces[0].queue_seconds], np.float32),
    }


def _prompt_logprobs(prompt: Prompt, scores: "list[TokenChoice]", options: RequestOptions, spell: Spell) -> np.ndarray:
    """Return the prompt's log-probabilities, (1,), as JSON of `_logprobs`; the first token's is null."""
    tokens = [TokenChoice(prompt.tokens[0]), *scores]
    texts = _texts(tokens, spell(not options.input_ids, ()))  # a prompt given as text shows its special tokens
    return np.array([_logprobs(tokens, texts).encode("utf-8")], np.object_)


def _logprobs(tokens: "Sequence[TokenChoice]", texts: "Sequence[Texts]") -> str:
    """Return JSON: a list of {token, text, logprob, top: [{token, text, logprob}]}."""
    entries = []
    for choice, text in zip(tokens, texts):
        listed = [
            {"token": token, "text": text[token], "logprob": logprob}
            for token, logprob in ((choice.token, choice.logprob), *choice.top)
        ]
        entries.append({**listed[0], "top": listed[1:]})
    return json.dumps(entries, ensure_ascii=False)


def _logprobs_by_id(tokens: "Sequence[TokenChoice]", texts: "Sequence[Texts]") -> str:
    """Return JSON: for each token {id: {logprob, rank, decoded_token}}, of itself and of the most probable ones.

    A token's rank is its place among the listed ones. Source: vllm_backend (8de0c14), src/utils/request.py.
    """
    entries = []
    for choice, text in zip(tokens, texts):
        listed = {choice.token: choice.logprob, **dict(choice.top)}
        ranks = {token: rank for rank, (token, _) in enumerate(choice.top, 1)}
        entries.append(
            {
                str(token): {
                    "logprob": logprob,
                    "rank": ranks.get(token, len(ranks) + 1),
                    "decoded_token": text[token],
                }
                for token, logprob in listed.items()
            }
        )
    return json.dumps(entries, ensure_ascii=False)
