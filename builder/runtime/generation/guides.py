"""Constrain an answer to JSON of a schema, a regular expression, a grammar, or one of several texts.

llguidance (https://github.com/guidance-ai/llguidance) determines which tokens may come next; it is imported by the
first request that needs it. Knows token ids and arrays; does not know how a token is chosen.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from ..fields import InputError
from .checking import refuse_half_characters
from .json_schemas import normalised, refuse_endless_documents
from .numerals import Numerals, NumeralState

MAX_CACHED_GUIDES = 64  # compiled guides
MAX_GUIDE_LENGTH = 64 * 1024  # characters of a guide
JSON_KINDS = frozenset(("json_schema", "json_object"))
CHECK_CPU_S = 2
CHECK_TIMEOUT_S = 20  # allows for a busy machine
# keywords that may test whether an intersection of regular expressions is empty: llguidance has no time limit there
INTERSECTING: "tuple[str, ...]" = ("allOf", "format", "multipleOf", "pattern", "patternProperties")
CHECK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[1]), int(sys.argv[1])))
from llguidance import LLMatcher
sys.stdout.buffer.write(LLMatcher.validate_grammar(sys.stdin.buffer.read().decode("utf-8")).encode("utf-8"))
"""
# No spaces between the parts of a document: a model that is unsure would write them without end. No \\u: a name
# could be written a second time, in another spelling.
JSON_FORM = {"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'}
STATE_MARK = "<state>"  # llguidance's errors continue after it with details for its developers


class Guide:
    """Constraint of one sequence: the tokens that may come next.

    `forced`: tokens that must come next, where only one text can follow. Of the token sequences that spell this text,
    it is the tokeniser's own. `complete`: True if the answer is complete, and nothing can follow. Do not use the
    matcher while `prepare` runs: it refuses two threads.
    """

    def __init__(
        self, matcher: Any, vocabulary: int, beside: ThreadPoolExecutor, numerals: "Numerals | None" = None
    ) -> None:
        """Start at the beginning. `numerals` limits the numbers of a JSON document; None for guides of another kind."""
        self.matcher, self.vocabulary, self.beside, self.numerals = matcher, vocabulary, beside, numerals
        self.place = NumeralState()
        self.forced: "list[int]" = list(matcher.compute_ff_tokens())
        self.complete = False
        self._next: "Future[np.ndarray] | None" = None

    def copy(self) -> Guide:
        """Return a copy for another sequence, which already computes the first allowed tokens."""
        copy = Guide(self.matcher.deep_copy(), self.vocabulary, self.beside, self.numerals)
        copy.prepare()
        return copy

    def push(self, token: int) -> None:
        """Advance by `token`. Raises InputError if the guide cannot continue."""
        self._next = None
        self.matcher.consume_token(token)
        self._refuse_error()
        if self.numerals is not None:
            self.place = self.place.after(self.numerals.text(token))
        self.complete = bool(self.matcher.is_stopped())
        self.forced = self.forced[1:] or list(self.matcher.compute_ff_tokens())

    def prepare(self) -> None:
        """Start to compute the tokens that may not come next, in another thread."""
        if self._next is None and not self.forced:
            self._next = self.beside.submit(self._forbidden)

    def apply(self, scores: np.ndarray) -> None:
        """Forbid tokens in `scores`, (vocabulary,), in place. Raises InputError if none is left."""
        forbidden = self._forbidden() if self._next is None else self._next.result()
        np.putmask(scores, forbidden, -np.inf)
        if scores.max() == -np.inf:
            raise InputError("guide leaves no token that the other options of this request, or the model, allow")

    def _forbidden(self) -> np.ndarray:
        """Return the forbidden tokens, (vocabulary,) bool. Raises InputError if the guide needs too much work."""
        allowed = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        self._refuse_error()
        bits = np.unpackbits(allowed, bitorder="little", count=self.vocabulary)
        forbidden = np.equal(bits, 0)
        if self.numerals is None:
            return forbidden
        shorter = forbidden.copy()
        shorter[self.numerals.too_long(self.place)] = True
        return forbidden if shorter.all() else shorter  # a schema may ask for a number of more digits

    def _refuse_error(self) -> None:
        if self.matcher.is_error():
            raise InputError(f"guide cannot go on: {_first_lines(self.matcher.get_error())}")


class Guides:
    """Compiles the guides of requests for one tokeniser, and caches them."""

    def __init__(self, tokenizer: Path, vocabulary: int, ends: "Sequence[int]") -> None:
        """Prepare to compile: `vocabulary` is the number of logits, `ends` the tokens that may end an answer.

        A guide needs at least one such token.
        """
        self.file, self.vocabulary, self.ends = tokenizer, vocabulary, list(ends)
        self.tokenizer: Any = None
        self.numerals: "Numerals | None" = None
        self.compiled: "OrderedDict[str, Any]" = OrderedDict()
        self.lock = threading.Lock()
        self.beside = ThreadPoolExecutor(1, "guides")

    def __call__(self, guide: "Mapping[str, Any]") -> Guide:
        """Compile a guide. Raises InputError, with the reason, if it is wrong, too large or too much work."""
        try:
            text = json.dumps(guide, ensure_ascii=False)
        except RecursionError as error:
            raise InputError("guide has too many levels") from error
        refuse_half_characters("guide", text)
        with self.lock:
            if text not in self.compiled:
                self.compiled[text] = self._compile(guide, text)
                while len(self.compiled) > MAX_CACHED_GUIDES:
                    self.compiled.popitem(last=False)
            self.compiled.move_to_end(text)
            matcher = self.compiled[text].deep_copy()
            numerals = self._numerals() if JSON_KINDS & guide.keys() else None
        return Guide(matcher, self.vocabulary, self.beside, numerals)

    def _compile(self, guide: "Mapping[str, Any]", text: str) -> Any:
        if len(text) > MAX_GUIDE_LENGTH:
            raise InputError(f"guide has {len(text)} characters; expected at most {MAX_GUIDE_LENGTH}")
        library = _library()
        tokenizer = self._tokenizer(library)
        if "json_schema" in guide:
            guide = {"json_schema": _answerable(guide["json_schema"])}
            text = json.dumps(guide)
        grammar = grammar_of(guide, library)
        if "regex" in guide or "grammar" in guide or any(f'"{name}"' in text for name in INTERSECTING):
            refuse_endless(grammar)
        matcher = library.LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InputError(f"guide is refused: {_first_lines(matcher.get_error())}")
        return matcher

    def _numerals(self) -> Numerals:
        if self.numerals is None:
            self.numerals = Numerals(self.tokenizer, self.vocabulary)
        return self.numerals

    def _tokenizer(self, library: Any) -> Any:
        if not self.ends:
            raise InputError("guide is not for this model: it has no token that ends an answer")
        if self.tokenizer is None:
            try:
                self.tokenizer = library.LLTokenizer(str(self.file), n_vocab=self.vocabulary, eos_token=self.ends)
            except Exception as error:  # anything that llguidance does not support in a tokeniser
                raise InputError(
                    f"guide is not for this model, whose tokeniser llguidance refuses: {_first_lines(str(error))}"
                ) from error
        return self.tokenizer


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise InputError(
            "guide needs llguidance in Triton's Python: install what build-repo's requirements.txt pins"
        ) from error
    return llguidance


def grammar_of(guide: "Mapping[str, Any]", library: Any) -> str:
    """Return the grammar that llguidance reads. `guide` has one key of `options.GUIDES`."""
    ((kind, value),) = guide.items()
    make = library.LLMatcher
    kinds: "dict[str, Callable[[], str]]" = {
        "json_schema": lambda: make.grammar_from_json_schema(json.dumps(value), overrides=JSON_FORM),
        "json_object": lambda: make.grammar_from_json_schema('{"type": "object"}', overrides=JSON_FORM),
        "regex": lambda: make.grammar_from_regex(value),
        "grammar": lambda: make.grammar_from_lark(value),
        "choice": lambda: make.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(map(json.dumps, value))),
    }
    try:
        return kinds[kind]()
    except Exception as error:
        raise InputError(f"guide is refused: {_first_lines(str(error))}") from error


def _answerable(schema: "Mapping[str, Any]") -> "dict[str, Any]":
    """Return `schema` in a form whose answers are valid and end. Raises InputError if it has no such form."""
    try:
        result = normalised(schema)
        refuse_endless_documents(result)
    except RecursionError as error:
        raise InputError("guide has too many levels") from error
    return result


def refuse_endless(grammar: str) -> None:
    """Check `grammar` in a separate process with time limits. Raises InputError if it is invalid or exceeds them."""
    command = [sys.executable or "python3", "-c", CHECK, str(CHECK_CPU_S)]
    try:
        done = subprocess.run(command, input=grammar.encode("utf-8"), capture_output=True, timeout=CHECK_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"guide is refused: after {CHECK_TIMEOUT_S} s it was not understood; send a simpler one"
        ) from error
    if done.returncode < 0:
        raise InputError(
            f"guide is refused: it takes more than {CHECK_CPU_S} s or too much memory to understand; send a simpler one"
        )
    if done.returncode:
        raise RuntimeError(f"a guide could not be checked: {_first_lines(done.stderr[-300:].decode(errors='replace'))}")
    problem = done.stdout.decode("utf-8")
    if problem and not problem.startswith("WARNING"):
        raise InputError(f"guide is refused: {_first_lines(problem)}")


def _first_lines(text: str) -> str:
    """Return an error of llguidance on one line, without its state and with a long grammar cut off."""
    return " ".join(text.split(STATE_MARK)[0].split())[:300]
