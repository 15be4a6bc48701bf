"""A generating model without Triton: one request's tensors in, its responses out through a callback.

Reads serving.json and the tokeniser beside it, and puts the engine's pieces into output tensors.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Union

import numpy as np
from tokenizers import Tokenizer

from ..contract import DRAFT, FILE, ContractError, GenerationServing, load_generation
from ..fields import InputError, Tensors, refuse_large, refuse_long
from .beams import BeamSearch
from .checking import read_options
from .engine import Engine
from .executors.base import EngineModel, Executor, Geometry
from .executors.bls import Bls
from .executors.bls_cuda import BlsCuda
from .executors.cuda import load_cuda
from .guides import Guides
from .options import LISTS, Options
from .processors import rules_of
from .prompts import DecoderPrompts, Prompt, SourceTexts, token_ids
from .sampling import Choice, Sampler
from .scheduler import Limits
from .sequences import Beams, GeneratedSequence, Later, Piece, Request, Running, at_once
from .text import Detokenizer, Spelling, StopStrings

Texts = dict[int, str]  # of tokens
Answer = Union["dict[str, np.ndarray]", Exception]
Respond = Callable[[Answer, bool], None]  # an answer, and whether it is the last


class Service:
    """Everything a front model does between Triton's requests and responses."""

    def __init__(self, folder: Path, infer: "EngineModel | None" = None) -> None:
        self.serving = load_generation(folder)
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        added = self.tokenizer.get_added_tokens_decoder().items()
        self.special = {entry.content: token for token, entry in added if entry.special}
        self.hidden = frozenset(self.special.values())
        serving = self.serving
        self.guides = Guides(folder / "tokenizer.json", serving.vocabulary, serving.end_ids)
        self.prompt: "Callable[[Options], Prompt]"
        if serving.source is not None:
            self.prompt = SourceTexts(serving.source, self.tokenizer)
            limits = Limits(serving.queue, serving.source.token_budget, serving.queue_timeout_ms / 1000)
        else:
            self.prompt = DecoderPrompts(serving.arena.length, serving.chat, self.tokenizer, serving.fill)
            assert serving.prefill_tokens is not None
            limits = Limits(serving.queue, serving.prefill_tokens, serving.queue_timeout_ms / 1000)
        executor, draft = make_executor(folder, serving, infer), make_draft(folder, serving)
        self.engine = Engine(executor, limits, serving.prefix_cache, draft)

    def submit(self, tensors: Tensors, parameters: "Mapping[str, Any]", respond: Respond) -> Request:
        """Prepare one request and start answering it. Raises InputError, QueueFull and EngineFailed."""
        prepared = self.prepare(tensors, parameters, respond)
        self.start(prepared)
        return prepared[0].request

    def start(self, prepared: "Sequence[Running]") -> None:
        """Start answering what `prepare` made. Raises QueueFull and EngineFailed."""
        self.engine.submit(prepared)

    def prepare(
        self, tensors: Tensors, parameters: "Mapping[str, Any]", respond: Respond, later: Later = at_once
    ) -> "list[Running]":
        """Read one request, all that takes long of it. Raises InputError for one that cannot be answered.

        Nothing is left to run of one that asks for tokens: it is answered at once.
        `respond` is called with `True` exactly once, last. `later`: does what makes answers of what the loop has said,
        which may take long (log-probabilities are written as JSON), from the loop's thread or from another.
        """
        limits = self.serving.limits
        refuse_large({name: array for name, array in tensors.items() if name != "input_ids"}, limits, parameters)
        options = read_options(tensors, parameters, self.serving.defaults, self.serving.fields)
        for name in (*LISTS, "logit_bias"):
            refuse_long(name, len(getattr(options, name)), limits)
        self._refuse_strange(options)
        if options.tokenize and isinstance(self.prompt, DecoderPrompts):
            answer = dict(zip(("text_output", "tokens"), self.prompt.tokens(options)))
            texts = {name: np.array([text.encode("utf-8")], np.object_) for name, text in answer.items()}
            later(partial(respond, texts, True))
            return []
        prompt = self.prompt(options)
        maximum = self._max_tokens(options, prompt)
        scores: "list[Choice] | None" = [] if options.prompt_logprobs >= 0 else None
        answers = (StreamedAnswer if options.stream else WholeAnswer)(self, options, prompt, respond, scores)
        deadline = time.monotonic() + options.timeout_ms / 1000 if options.timeout_ms else None
        tokens, source = list(prompt.tokens), prompt.source

        def fail(error: Exception) -> None:
            later(partial(respond, error, True))

        request = Request(tokens, options, maximum, answers.add, fail, deadline, source, scores=scores, later=later)
        return self._sequences(request, prompt.first)

    def _max_tokens(self, options: Options, prompt: Prompt) -> int:
        longest = self.serving.arena.length
        room = longest - len(prompt.tokens)
        if options.max_tokens is None:
            total = self.serving.total_length or longest
            total = min(total, self._held(options.num_beams))
            return max(1, min(self.serving.max_tokens, room, total - len(prompt.tokens)))
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
        options = request.options
        if options.num_beams > self.serving.beams:
            raise InputError(
                f"num_beams is {options.num_beams}; this model was built for at most {self.serving.beams}. "
                f"Build it with --beams {options.num_beams} and at least as many --slots"
            )
        ends = frozenset(self.serving.end_ids) if not options.ignore_eos else frozenset()
        ends |= frozenset(options.stop_token_ids)
        ends |= {self.special[word] for word in options.stop_words if word in self.special}  # which no text shows
        self._refuse_too_large(request)
        source = request.source or tuple(request.prompt)  # a decoder reads its prompt
        always, guide = self.serving.rules, None
        if options.guide is not None:
            guide = self.guides(options.guide)
            always = replace(always, last=())  # an answer that is cut off ends where it is cut
        rules = rules_of(
            always,
            options,
            tuple(sorted(ends)),
            self._bad_words(options),
            source,
            first,
            request.max_tokens,
        )

        def detokenizer() -> Detokenizer:
            special = options.skip_special_tokens
            clean_up = self.serving.clean_up and guide is None  # a guide says what the text is, spaces too
            return Detokenizer(self.tokenizer, request.prompt, special, clean_up)

        if options.num_beams > 1:
            return [Beams(request, BeamSearch(rules, request.prompt, ends), detokenizer)]
        return [
            GeneratedSequence(
                request,
                Sampler(rules, index, request.prompt, guide=guide and guide.copy()),
                detokenizer(),
                StopStrings(options.stop_words),
                ends,
            )
            for index in range(options.n)
        ]

    def _refuse_strange(self, options: Options) -> None:
        """Raise InputError for what is not a token of this model."""
        tokens, vocabulary = (*options.logit_bias, *options.stop_token_ids, *options.input_ids), self.serving.vocabulary
        strange = [token for token in tokens if not 0 <= token < vocabulary]
        if strange:
            raise InputError(f"{strange[0]} is not a token id; this model has 0 to {vocabulary - 1}")

    def _held(self, beams: int) -> int:
        """The tokens, prompt and answer, of which an empty cache holds `beams` rows."""
        blocks = self.engine.cache.blocks
        return self.serving.arena.length if blocks is None else blocks.count // beams * blocks.size

    def _refuse_too_large(self, request: Request) -> None:
        """Raise InputError for what would not fit into an empty cache whose memory sequences share."""
        blocks, beams = self.engine.cache.blocks, request.options.num_beams
        tokens = len(request.prompt) + request.max_tokens
        if blocks is not None and beams * blocks.of(tokens) > blocks.count:
            shorter = "send a shorter prompt or fewer num_beams"
            if request.options.max_tokens is not None:
                shorter = "lower max_tokens or num_beams"
            raise InputError(
                f"{beams} beams of up to {tokens} tokens need {beams * blocks.of(tokens)} blocks of the cache, of "
                f"{blocks.count}: {shorter}, or build the model with a larger --cache-gb"
            )

    def _bad_words(self, options: Options) -> "tuple[tuple[int, ...], ...]":
        forms = [form for word in options.bad_words for form in (word, f" {word}")]
        words = {tuple(ids) for ids in token_ids(self.tokenizer, forms, special=False)}
        return tuple(words)

    def spelling(self, skip_special: bool, before: "Sequence[int]" = ()) -> Spelling:
        """How tokens that follow `before` are written."""
        return Spelling(self.tokenizer, self.hidden if skip_special else (), before)


def make_executor(folder: Path, serving: GenerationServing, infer: "EngineModel | None") -> Executor:
    """The executor that serving.json describes; `infer` is for those that call another model.

    Raises ContractError where its engine is not here.
    """
    arena = serving.arena
    geometry = Geometry(
        arena.slots, arena.length, serving.vocabulary, Geometry.pairs(arena.layers), arena.dtype, arena.blocks
    )
    if serving.executor == "bls":
        assert infer is not None
        if serving.session.device == "cpu":
            return Bls(infer, serving.inputs, geometry)
        load_cuda()  # logits may come on the GPU, and are copied from there
        return BlsCuda(infer, serving.inputs, serving.outputs, geometry)
    executor: Executor = _engine(serving.session.engine).open_executor(folder, serving, geometry)
    return executor


def make_draft(folder: Path, serving: GenerationServing) -> "Executor | None":
    """The executor of the model that guesses, opened as the one that answers is; None where there is none.

    Raises ContractError.
    """
    beside = folder / DRAFT
    if not (beside / FILE).is_file():
        return None
    return make_executor(beside, replace(load_generation(beside), session=serving.session), None)


def _engine(name: str) -> Any:
    """The module in executors/ of an engine, which is installed where it serves. Raises ContractError."""
    if Path(__file__).with_name("executors").joinpath(f"{name}.py").is_file():
        module = importlib.import_module(f".executors.{name}", __package__)
        if hasattr(module, "open_executor"):
            return module
    raise ContractError(f"serving.json.session.engine is {name!r}, which is not here. Build the model again")


class StreamedAnswer:
    """One response a piece of text. `scores`: of the prompt, all there before the first piece."""

    def __init__(
        self, service: Service, options: Options, prompt: Prompt, respond: Respond, scores: "list[Choice] | None"
    ) -> None:
        self.service, self.respond = service, respond
        self.prompt, self.scores = prompt, scores
        self.prompt_tokens = prompt.length
        self.options = options
        self.left = options.n
        skipped = options.skip_special_tokens
        self.spellings = [service.spelling(skipped, prompt.tokens) for _ in range(options.n)]
        self.echo = dict.fromkeys(range(options.n), prompt.text) if options.echo else {}

    def add(self, piece: Piece) -> None:
        self.left -= bool(piece.finish_reason)
        text = self.echo.pop(piece.index, "") + piece.text
        tensors = _tensors([piece], [text], self.prompt_tokens)
        tensors |= _scored([piece.tokens], [self.spellings[piece.index]], self.options)
        tensors |= _counted([len(piece.tokens)], self.prompt_tokens, self.options)
        if piece.finish_reason:
            tensors |= _measured([piece], self.options)
        if self.scores is not None:
            tensors["prompt_logprobs_output"] = _prompt_logprobs(self.prompt, self.scores, self.options, self.service)
            self.scores = None
        self.respond(tensors, not self.left)


class WholeAnswer:
    """One response for all sequences of a request, when the last of them has ended."""

    def __init__(
        self, service: Service, options: Options, prompt: Prompt, respond: Respond, scores: "list[Choice] | None"
    ) -> None:
        self.service, self.options, self.respond = service, options, respond
        self.prompt, self.scores = prompt, scores
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
            tensors = _tensors(pieces, self.texts, self.prompt_tokens)
            skipped, before = self.options.skip_special_tokens, self.prompt.tokens
            spellings = [self.service.spelling(skipped, before) for _ in self.tokens]
            tensors |= _scored(self.tokens, spellings, self.options)
            counts = [piece.completion_tokens for piece in pieces]
            tensors |= _counted(counts, self.prompt_tokens, self.options)
            tensors |= _measured(pieces, self.options)
            if self.scores is not None:
                scores = _prompt_logprobs(self.prompt, self.scores, self.options, self.service)
                tensors["prompt_logprobs_output"] = scores
            self.respond(tensors, True)


def _tensors(pieces: "list[Piece]", texts: "list[str]", prompt_tokens: int) -> "dict[str, np.ndarray]":
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
    return tensors


def _scored(
    tokens: "Sequence[Sequence[Choice]]", spellings: "Sequence[Spelling]", options: Options
) -> "dict[str, np.ndarray]":
    """Log-probabilities of each sequence's tokens, where they are asked for; `logprobs` is as vLLM's backend has it."""
    written: "dict[str, Callable[[Sequence[Choice], Sequence[Texts]], str]]" = {}
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


def _texts(tokens: "Sequence[Choice]", spelling: Spelling) -> "list[Texts]":
    """Of each choice the texts of its token and of the most probable ones."""
    return [spelling([choice.token, *(token for token, _ in choice.top)]) for choice in tokens]


def _counted(tokens: "list[int]", prompt_tokens: int, options: Options) -> "dict[str, np.ndarray]":
    """As vLLM's backend counts, where it is asked to: the prompt's tokens, and those that came with this response."""
    if not options.count_tokens:
        return {}
    return {
        "num_input_tokens": np.array([prompt_tokens], np.uint32),
        "num_output_tokens": np.array(tokens, np.uint32),
    }


def _measured(pieces: "list[Piece]", options: Options) -> "dict[str, np.ndarray]":
    """What is measured of an answer that has ended, where it is asked for: it differs from time to time."""
    if not options.return_perf_metrics:
        return {}
    return {
        "cached_tokens": np.array([pieces[0].cached_tokens], np.int32),
        "queue_seconds": np.array([pieces[0].queue_seconds], np.float32),
    }


def _prompt_logprobs(prompt: Prompt, scores: "list[Choice]", options: Options, service: Service) -> np.ndarray:
    """(1,): JSON as `_logprobs` makes it; nothing comes before the first token, so its log-probability is null."""
    tokens = [Choice(prompt.tokens[0]), *scores]
    texts = _texts(tokens, service.spelling(not options.input_ids))  # whose text has its special tokens
    return np.array([_logprobs(tokens, texts).encode("utf-8")], np.object_)


def _logprobs(tokens: "Sequence[Choice]", texts: "Sequence[Texts]") -> str:
    """JSON: a list of {token, text, logprob, top: [{token, text, logprob}]}."""
    entries = []
    for choice, text in zip(tokens, texts):
        listed = [
            {"token": token, "text": text[token], "logprob": logprob}
            for token, logprob in ((choice.token, choice.logprob), *choice.top)
        ]
        entries.append({**listed[0], "top": listed[1:]})
    return json.dumps(entries, ensure_ascii=False)


def _logprobs_by_id(tokens: "Sequence[Choice]", texts: "Sequence[Texts]") -> str:
    """JSON: of each token {id: {logprob, rank, decoded_token}}, the token itself and the most probable ones.

    A token's rank is that among those listed. Source: vllm_backend (8de0c14), src/utils/request.py.
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
