"""A generating model without Triton: one request's tensors in, its responses out through a callback.

Reads serving.json and the tokeniser beside it, and puts the engine's pieces into output tensors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Union

import numpy as np
from tokenizers import Tokenizer

from ..fields import InputError, Tensors
from .beams import BeamSearch
from .device import OnDevice, load_cuda
from .engine import Engine
from .executor import CrossAttending, CrossGeometry, Executor, Geometry, Infer, InProcess, Remote
from .handles import Handles
from .options import Options, read_options
from .processors import Rules
from .prompts import DecoderPrompts, Prompt, SourceTexts
from .sampling import Choice, Sampler
from .scheduler import Limits
from .sequences import Beams, GeneratedSequence, Piece, Request, Running
from .text import Detokenizer, StopStrings

Answer = Union["dict[str, np.ndarray]", Exception]
Respond = Callable[[Answer, bool], None]  # an answer, and whether it is the last


class Service:
    """Everything a front model does between Triton's requests and responses."""

    def __init__(self, folder: Path, infer: "Infer | None" = None) -> None:
        self.serving: "dict[str, Any]" = json.loads((folder / "serving.json").read_text("utf-8"))
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.prompt = (SourceTexts if "source" in self.serving else DecoderPrompts)(self.serving, self.tokenizer)
        limits = Limits(self.serving["queue"], self.serving["prefill_tokens"])
        self.engine = Engine(make_executor(folder, self.serving, infer), limits, self.serving["prefix_cache"])

    def submit(self, tensors: Tensors, parameters: "Mapping[str, Any]", respond: Respond) -> Request:
        """Start answering one request. Raises InputError for one that cannot be answered, QueueFull and EngineFailed.

        `respond` is called from the loop's thread, with `True` exactly once, last.
        """
        options = read_options(tensors, parameters, self.serving["defaults"], self.serving["fields"])
        prompt = self.prompt(options)
        maximum = self._max_tokens(options, prompt)
        answers = (StreamedAnswer if options.stream else WholeAnswer)(self, options, prompt, respond)
        deadline = time.monotonic() + options.timeout_ms / 1000 if options.timeout_ms else None
        tokens, fail = list(prompt.tokens), lambda error: respond(error, True)
        request = Request(tokens, options, maximum, answers.add, fail, deadline, prompt.source)
        self.engine.submit(self._sequences(request, prompt.first))
        return request

    def _max_tokens(self, options: Options, prompt: Prompt) -> int:
        longest = self.serving["max_length"]
        room = longest - len(prompt.tokens)
        if options.max_tokens is None:
            total = self.serving.get("total_length") or longest
            return max(1, min(int(self.serving["max_tokens"]), room, total - len(prompt.tokens)))
        if not 1 <= options.max_tokens <= room:
            raise InputError(
                f"max_tokens is {options.max_tokens}; after a prompt of {len(prompt.tokens)} tokens it can be 1 to "
                f"{room} (this model holds {longest} tokens)"
            )
        if options.min_tokens > options.max_tokens:
            raise InputError(f"min_tokens is {options.min_tokens}, more than max_tokens, {options.max_tokens}")
        return options.max_tokens

    def _sequences(self, request: Request, first: "int | None") -> "list[Running]":
        """What the engine is to run for a request: its n sequences, or the beams of its one search."""
        options, vocabulary = request.options, self.serving["vocabulary"]
        strange = [t for t in (*options.logit_bias, *options.stop_token_ids) if not 0 <= t < vocabulary]
        if strange:
            raise InputError(f"{strange[0]} is not a token id; this model has 0 to {vocabulary - 1}")
        if options.num_beams > self.serving["beams"]:
            raise InputError(
                f"num_beams is {options.num_beams}; this model was built for at most {self.serving['beams']}. "
                f"Build it with --beams {options.num_beams} and at least as many --slots"
            )
        ends = frozenset(self.serving["end_ids"]) if not options.ignore_eos else frozenset()
        ends |= frozenset(options.stop_token_ids)
        decay = self.serving["decay"]
        rules = Rules(
            options,
            tuple(sorted(ends)),
            self._bad_words(options),
            source=request.source or tuple(request.prompt),  # a decoder reads its prompt
            first=first,
            last=tuple(self.serving["last"]),
            max_tokens=request.max_tokens,
            sequence_bias=tuple((tuple(word), bias) for word, bias in self.serving["sequence_bias"]),
            suppressed=tuple(self.serving["suppressed"]),
            begin_suppressed=tuple(self.serving["begin_suppressed"]),
            decay=(decay[0], decay[1]) if decay else None,
        )

        def detokenizer() -> Detokenizer:
            return Detokenizer(self.tokenizer, request.prompt)

        if options.num_beams > 1:
            return [Beams(request, BeamSearch(rules, request.prompt, ends), detokenizer)]
        return [
            GeneratedSequence(
                request, Sampler(rules, index, request.prompt), detokenizer(), StopStrings(options.stop_words), ends
            )
            for index in range(options.n)
        ]

    def _bad_words(self, options: Options) -> "tuple[tuple[int, ...], ...]":
        words = {
            tuple(self.tokenizer.encode(form, add_special_tokens=False).ids)
            for word in options.bad_words
            for form in (word, f" {word}")
        }
        words |= {tuple(word) for word in self.serving["bad_words"]}
        return tuple(sorted(words - {()}))

    def token_text(self, token: int) -> str:
        """One token as text, as log-probabilities name it."""
        return self.tokenizer.decode([token], skip_special_tokens=False)


def make_executor(folder: Path, serving: "Mapping[str, Any]", infer: "Infer | None") -> Executor:
    """The executor that serving.json names; `infer` is for the one that calls another model."""
    layers = tuple((heads, size) for heads, size in serving["layers"])
    geometry = Geometry(serving["slots"], serving["max_length"], serving["vocabulary"], layers, serving["cache"])
    if "source" in serving:
        cross = serving["cross"]
        shape = CrossGeometry(cross["max_length"], serving["beams"], tuple((h, s) for h, s in cross["layers"]))
        files = folder / serving["model"], folder / serving["encoder"]
        return CrossAttending(*files, geometry, shape, serving["session"])
    if serving["executor"] == "on_device":
        return OnDevice(folder / serving["model"], folder / serving["copier"], geometry, serving["session"])
    if serving["executor"] == "in_process":
        return InProcess(folder / serving["model"], geometry, serving["session"])
    assert infer is not None
    if serving["executor"] == "handles":
        load_cuda()  # logits may come on the GPU, and are copied from there
        return Handles(infer, serving["inputs"], geometry)
    return Remote(infer, serving["inputs"], geometry)


class StreamedAnswer:
    """One response a piece of text."""

    def __init__(self, service: Service, options: Options, prompt: Prompt, respond: Respond) -> None:
        self.service, self.respond = service, respond
        self.logprobs = options.logprobs >= 0
        self.prompt_tokens = prompt.length
        self.left = options.n
        self.echo = dict.fromkeys(range(options.n), prompt.text) if options.echo else {}

    def add(self, piece: Piece) -> None:
        self.left -= bool(piece.finish_reason)
        text = self.echo.pop(piece.index, "") + piece.text
        logprobs = [_logprobs(piece.tokens, self.service)] if self.logprobs else None
        tensors = _tensors([piece], [text], self.prompt_tokens, logprobs)
        self.respond(tensors, not self.left)


class WholeAnswer:
    """One response for all sequences of a request, when the last of them has ended."""

    def __init__(self, service: Service, options: Options, prompt: Prompt, respond: Respond) -> None:
        self.service, self.options, self.respond = service, options, respond
        self.prompt_tokens = prompt.length
        self.texts = [prompt.text if options.echo else ""] * options.n
        self.tokens: "list[list[Choice]]" = [[] for _ in range(options.n)]
        self.last: "dict[int, Piece]" = {}

    def add(self, piece: Piece) -> None:
        self.texts[piece.index] += piece.text
        self.tokens[piece.index].extend(piece.tokens)
        if piece.finish_reason:
            self.last[piece.index] = piece
        if len(self.last) == self.options.n:
            pieces = [self.last[index] for index in range(self.options.n)]
            wanted = self.options.logprobs >= 0
            logprobs = [_logprobs(tokens, self.service) for tokens in self.tokens] if wanted else None
            self.respond(_tensors(pieces, self.texts, self.prompt_tokens, logprobs), True)


def _tensors(
    pieces: "list[Piece]", texts: "list[str]", prompt_tokens: int, logprobs: "list[str] | None"
) -> "dict[str, np.ndarray]":
    """Output tensors; text always, counts and reasons with the last piece of a sequence."""
    tensors = {"text_output": np.array([text.encode("utf-8") for text in texts], np.object_)}
    if any(piece.index for piece in pieces) or len(pieces) > 1:
        tensors["index"] = np.array([piece.index for piece in pieces], np.int32)
    if all(piece.finish_reason for piece in pieces):
        tensors["finish_reason"] = np.array([piece.finish_reason.encode() for piece in pieces], np.object_)
        tensors["prompt_tokens"] = np.array([prompt_tokens], np.int32)
        tensors["completion_tokens"] = np.array([piece.completion_tokens for piece in pieces], np.int32)
        if all(piece.score is not None for piece in pieces):
            tensors["scores"] = np.array([piece.score for piece in pieces], np.float32)
    if logprobs is not None:
        tensors["logprobs_output"] = np.array([text.encode("utf-8") for text in logprobs], np.object_)
    return tensors


def _logprobs(tokens: "list[Choice] | tuple[Choice, ...]", service: Service) -> str:
    """JSON: a list of {token, text, logprob, top: [{token, text, logprob}]}."""

    def entry(token: int, logprob: "float | None") -> "dict[str, Any]":
        return {"token": token, "text": service.token_text(token), "logprob": logprob}

    return json.dumps(
        [{**entry(c.token, c.logprob), "top": [entry(token, value) for token, value in c.top]} for c in tokens],
        ensure_ascii=False,
    )
