"""Serve a generating model without Triton: one request's tensors in, its responses out through a callback.

Reads serving.json and the tokeniser beside it.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ..adapter_files import ALL_ADAPTERS, FOLDER, Adapters, adapter_names
from ..contract import DRAFT, FILE, ContractError, GenerationServing, load_generation
from ..cpus import refuse_cpu
from ..fields import InputError, Tensors, refuse_large, refuse_long
from .beams import BeamSearch
from .checking import read_options
from .decode_loop import DecodeLoop
from .executors.base import EngineModel, Executor, Geometry
from .guides import Guides
from .options import LISTS, RequestOptions
from .processors import make_rules
from .prompts import Prompt, Prompts, token_ids
from .responses import AnswerWriter, Respond
from .sampling import Sampler, TokenChoice
from .scheduler import SchedulerLimits
from .sequences import BeamSequence, Defer, GeneratedSequence, Request, RunningSequence, run_now
from .text import Detokenizer, Spelling, StopStrings


class Service:
    """Everything a front model does between receiving Triton's requests and sending responses."""

    def __init__(self, folder: Path, infer: "EngineModel | None" = None) -> None:
        self.serving = load_generation(folder)
        refuse_cpu((), self.serving.needs_cpus_with)
        self.tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        added = self.tokenizer.get_added_tokens_decoder().items()
        self.special = {entry.content: token for token, entry in added if entry.special}
        self.hidden = frozenset(self.special.values())
        serving = self.serving
        self.guides = Guides(folder / "tokenizer.json", serving.vocabulary, serving.end_ids)
        prompts = importlib.import_module(f".{serving.prompts_module}", __package__)
        self.prompt: Prompts = prompts.open_prompts(serving, self.tokenizer)
        token_budget = serving.prefill_tokens if serving.source is None else serving.source.token_budget
        assert token_budget is not None
        limits = SchedulerLimits(serving.queue, token_budget, serving.queue_timeout_ms / 1000)
        executor, draft = make_executor(folder, serving, infer), make_draft(folder, serving)
        self.adapters = None if executor.lora is None else Adapters(folder.parent / FOLDER, executor.lora)
        self.loop = DecodeLoop(executor, limits, serving.prefix_cache, draft)

    def submit(self, tensors: Tensors, parameters: "Mapping[str, Any]", respond: Respond) -> Request:
        """Prepare one request and start answering it. Raises InputError, QueueFull and DecodeLoopFailed."""
        prepared = self.prepare(tensors, parameters, respond)
        self.start(prepared)
        return prepared[0].request

    def start(self, prepared: "Sequence[RunningSequence]") -> None:
        """Start answering the sequences that `prepare` returned. Raises QueueFull and DecodeLoopFailed."""
        self.loop.submit(prepared)

    def prepare(
        self, tensors: Tensors, parameters: "Mapping[str, Any]", respond: Respond, defer: Defer = run_now
    ) -> "list[RunningSequence]":
        """Read one request, including all the slow work; raise InputError if it cannot be answered.

        A request that only asks for tokens, or for adapters, is answered at once, and the returned list is empty.
        `respond` is called with `True` exactly once, with the last answer. `defer` runs what turns pieces into
        responses, which may be slow (log-probabilities are written as JSON), in the loop's thread or in another.
        """
        limits = self.serving.limits
        refuse_large({name: array for name, array in tensors.items() if name != "input_ids"}, limits, parameters)
        options = read_options(tensors, parameters, self.serving.defaults, self.serving.fields)
        for name in (*LISTS, "logit_bias"):
            refuse_long(name, len(getattr(options, name)), limits)
        self._refuse_unknown_tokens(options)
        if answer := self._known_answer(options):
            texts = {name: np.array([text.encode("utf-8")], np.object_) for name, text in answer.items()}
            defer(partial(respond, texts, True))
            return []
        adapter = self.adapters.find(options.lora_name) if self.adapters is not None and options.lora_name else None
        prompt = self.prompt(options)
        maximum = self._max_tokens(options, prompt)
        scores: "list[TokenChoice] | None" = [] if options.prompt_logprobs >= 0 else None
        answers = AnswerWriter(self.spelling, options, prompt, respond, scores)
        deadline = time.monotonic() + options.timeout_ms / 1000 if options.timeout_ms else None
        tokens, source = list(prompt.tokens), prompt.source

        def fail(error: Exception) -> None:
            defer(partial(respond, error, True))

        request = Request(
            tokens, options, maximum, answers.add, fail, deadline, source, adapter, scores=scores, defer=defer
        )
        return self._sequences(request, prompt.first)

    def _known_answer(self, options: RequestOptions) -> "dict[str, str]":
        """Return the tokens of the prompt, or the names of the adapters, if the request asks for that; else nothing."""
        if options.tokenize:
            return dict(zip(("text_output", "tokens"), self.prompt.tokens(options)))
        if self.adapters is not None and options.lora_name == ALL_ADAPTERS:
            return {"text_output": json.dumps(adapter_names(self.adapters.folder))}
        return {}

    def _max_tokens(self, options: RequestOptions, prompt: Prompt) -> int:
        longest = self.serving.arena.length
        remaining = longest - len(prompt.tokens)
        if options.max_tokens is None:
            total = self.serving.total_length or longest
            if total <= len(prompt.tokens) < longest:  # transformers' generate refuses this as well
                raise InputError(
                    f"the prompt has {len(prompt.tokens)} tokens, and the checkpoint's max_length allows {total} for "
                    "prompt and answer together; send max_tokens or a shorter prompt"
                )
            total = min(total, self._max_row_tokens(options.num_beams))
            return max(1, min(self.serving.max_tokens, remaining, total - len(prompt.tokens)))
        if not 1 <= options.max_tokens <= remaining:
            raise InputError(
                f"max_tokens is {options.max_tokens}; after a prompt of {len(prompt.tokens)} tokens it can be 1 to "
                f"{remaining} (this model holds {longest} tokens)"
            )
        if options.min_tokens > options.max_tokens:
            raise InputError(
                f"min_tokens is {options.min_tokens}, more than max_tokens, {options.max_tokens}; lower one or raise "
                "the other"
            )
        return options.max_tokens

    def _sequences(self, request: Request, first: "int | None") -> "list[RunningSequence]":
        """Return the sequences that the decode loop runs for a request: its n sequences, or its one beam search."""
        options = request.options
        if options.num_beams > self.serving.beams:
            raise InputError(
                f"num_beams is {options.num_beams}; this model was built for at most {self.serving.beams}. "
                f"Build it with --beams {options.num_beams} and at least as many --slots"
            )
        self._refuse_too_large(request)
        ends = self._ends(options)
        source = request.source or tuple(request.prompt)  # a decoder reads its prompt
        always, guide = self.serving.rules, None
        if options.guide is not None:
            guide = self.guides(options.guide)
            always = replace(always, last=())  # a guided answer that is cut off gets no forced last token
        bad_words = self._bad_words(options)
        rules = make_rules(always, options, tuple(sorted(ends)), bad_words, source, first, request.max_tokens)

        def detokenizer() -> Detokenizer:
            special = options.skip_special_tokens
            clean_up = self.serving.clean_up and guide is None  # a guide determines the text, including spaces
            return Detokenizer(self.tokenizer, request.prompt, special, clean_up)

        if options.num_beams > 1:
            return [BeamSequence(request, BeamSearch(rules, request.prompt, ends), detokenizer)]
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

    def _ends(self, options: RequestOptions) -> "frozenset[int]":
        """Return the tokens that end an answer."""
        ends = {*options.stop_token_ids, *(() if options.ignore_eos else self.serving.end_ids)}
        ends |= {self.special[word] for word in options.stop_words if word in self.special}  # not shown in text
        return frozenset(ends)

    def _refuse_unknown_tokens(self, options: RequestOptions) -> None:
        """Raise InputError for token ids outside the vocabulary."""
        tokens, vocabulary = (*options.logit_bias, *options.stop_token_ids, *options.input_ids), self.serving.vocabulary
        unknown = [token for token in tokens if not 0 <= token < vocabulary]
        if unknown:
            raise InputError(f"{unknown[0]} is not a token id; this model has 0 to {vocabulary - 1}")

    def _max_row_tokens(self, beams: int) -> int:
        """Return how many tokens, prompt and answer, each of `beams` rows can have in an empty cache."""
        blocks = self.loop.cache.blocks
        return self.serving.arena.length if blocks is None else blocks.num_blocks // beams * blocks.block_size

    def _refuse_too_large(self, request: Request) -> None:
        """Raise InputError for a request that would not fit into an empty cache of shared blocks."""
        blocks, beams = self.loop.cache.blocks, request.options.num_beams
        tokens = len(request.prompt) + request.max_tokens
        needed = 0 if blocks is None else beams * blocks.count_for(tokens)
        if blocks is not None and needed > blocks.num_blocks:
            shorter = "send a shorter prompt or fewer num_beams"
            if request.options.max_tokens is not None:
                shorter = "lower max_tokens or num_beams"
            raise InputError(
                f"{beams} beams of up to {tokens} tokens need {needed} blocks of the cache, of {blocks.num_blocks}: "
                f"{shorter}, or build the model with a larger --cache-gb"
            )

    def _bad_words(self, options: RequestOptions) -> "tuple[tuple[int, ...], ...]":
        forms = [form for word in options.bad_words for form in (word, f" {word}")]
        words = {tuple(ids) for ids in token_ids(self.tokenizer, forms, special=False)}
        return tuple(words)

    def spelling(self, skip_special: bool, before: "Sequence[int]") -> Spelling:
        """Return the spelling of tokens that follow `before`."""
        return Spelling(self.tokenizer, self.hidden if skip_special else (), before)


def make_executor(folder: Path, serving: GenerationServing, infer: "EngineModel | None") -> Executor:
    """Return the executor that serving.json describes; `infer` is for executors that call another model.

    Raises ContractError if its engine is not in this package.
    """
    arena = serving.arena
    geometry = Geometry(
        arena.slots,
        arena.length,
        serving.vocabulary,
        Geometry.pairs(arena.layers),
        arena.dtype,
        arena.blocks,
        Geometry.states_of(arena.layers),
    )
    opened = folder if serving.executor == "in-process" else infer
    executor: Executor = _executor_module(serving).open_executor(opened, serving, geometry)
    executor.drafts_in_place = serving.drafts_in_place
    return executor


def make_draft(folder: Path, serving: GenerationServing) -> "Executor | None":
    """Return the executor of the draft model, opened like the answering model's but over a cache of its own type.

    None without a draft. Raises ContractError.
    """
    beside = folder / DRAFT
    if not (beside / FILE).is_file():
        return None
    draft = load_generation(beside)
    session = replace(serving.session, entries={**serving.session.entries, **draft.session.entries})
    return make_executor(beside, replace(draft, session=session), None)


def _executor_module(serving: GenerationServing) -> Any:
    """Import the module in executors/ that serving.json names. Raises ContractError if it is not in this package."""
    name = serving.executor_module
    if Path(__file__).with_name("executors").joinpath(f"{name}.py").is_file():
        module = importlib.import_module(f".executors.{name}", __package__)
        if hasattr(module, "open_executor"):
            return module
    raise ContractError(
        f"serving.json.session.engine is {serving.session.engine!r}, which is not here: executors has no {name}.py. "
        "Build the model again"
    )
