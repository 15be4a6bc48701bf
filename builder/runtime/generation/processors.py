"""Change a row's scores before a token is chosen: transformers' logits processors, in its order.

Knows the token ids of one row; does not know how a token is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..contract import TokenRules
from .options import RequestOptions


@dataclass(frozen=True)
class Rules:
    """Score rules of one request: `ends` end the answer, `last` is forced as the `max_tokens`-th token."""

    options: RequestOptions
    ends: "tuple[int, ...]" = ()
    bad_words: "tuple[tuple[int, ...], ...]" = ()
    source: "tuple[int, ...]" = ()  # tokens that the encoder of an encoder-decoder read
    first: "int | None" = None  # the token that every answer begins with
    last: "tuple[int, ...]" = ()
    max_tokens: int = 0
    sequence_bias: "tuple[tuple[tuple[int, ...], float], ...]" = ()
    suppressed: "tuple[int, ...]" = ()
    begin_suppressed: "tuple[int, ...]" = ()  # banned as the first token that is not forced
    decay: "tuple[int, float] | None" = None  # (start, factor), see contract.Decay
    # precomputed for `apply`
    _bias: "tuple[np.ndarray, np.ndarray]" = field(init=False, repr=False)  # tokens, and the bias of each
    _bad_ends: "dict[int, dict[tuple[int, ...], list[int]]]" = field(init=False, repr=False)  # by size, then beginning
    _source_ngrams: "dict[tuple[int, ...], list[int]]" = field(init=False, repr=False)
    _changes: bool = field(init=False, repr=False)  # True if scores change at every token
    _bans: bool = field(init=False, repr=False)  # True if tokens are banned at every token

    def __post_init__(self) -> None:
        options = self.options
        bias = np.array(list(options.logit_bias), np.int64), np.array(list(options.logit_bias.values()), np.float64)
        object.__setattr__(self, "_bias", bias)
        object.__setattr__(self, "_bad_ends", _ends_by_beginning(self.bad_words))
        size = options.encoder_no_repeat_ngram_size
        object.__setattr__(self, "_source_ngrams", _continuations(self.source, size) if size else {})
        changes = (
            options.repetition_penalty != 1
            or options.encoder_repetition_penalty != 1
            or bool(options.presence_penalty)
            or bool(options.frequency_penalty)
            or bool(options.logit_bias)
            or bool(self.sequence_bias)
            or self.decay is not None
        )
        forbids = (
            bool(options.no_repeat_ngram_size)
            or bool(options.encoder_no_repeat_ngram_size)
            or bool(self.bad_words)
            or bool(self.suppressed)
        )
        object.__setattr__(self, "_changes", changes)
        object.__setattr__(self, "_bans", forbids)

    def is_idle(self, generated: int) -> bool:
        """Return True if the rules change no scores after `generated` tokens."""
        return not (
            self._changes
            or self._bans
            or generated < self.options.min_tokens
            or (self.begin_suppressed and generated == self.begin)
            or self._forces(generated)
        )

    def only_bans(self, generated: int) -> bool:
        """Return True if after `generated` tokens the rules change only the scores of `banned_tokens`."""
        return not (self._changes or self._forces(generated))

    def _forces(self, generated: int) -> bool:
        return (generated == 0 and self.first is not None) or (generated == self.max_tokens - 1 and bool(self.last))

    @property
    def begin(self) -> int:
        """Number of forced tokens before the first one that is chosen."""
        return 0 if self.first is None else 1

    def apply(self, scores: np.ndarray, prompt: "Sequence[int]", generated: "Sequence[int]") -> None:
        """Apply all rules to `scores`, (vocabulary,), in place: biases, penalties, bans, forced tokens and decay."""
        options = self.options
        for word, bias in self.sequence_bias:
            if _follows([*prompt, *generated], word):
                scores[word[-1]] += bias
        if options.encoder_repetition_penalty != 1:
            _penalise(scores, self.source, 1 / options.encoder_repetition_penalty)
        if options.repetition_penalty != 1:
            _penalise(scores, [*prompt, *generated], options.repetition_penalty)
        if generated and (options.presence_penalty or options.frequency_penalty):
            seen, counts = np.unique(np.array(generated, dtype=np.int64), return_counts=True)
            scores[seen] -= options.presence_penalty + options.frequency_penalty * counts.astype(np.float32)
        if options.logit_bias:
            tokens, values = self._bias
            scores[tokens] = scores[tokens] + values
        scores[self._banned(prompt, generated)] = -np.inf
        forced = [self.first] if not generated and self.first is not None else []
        if self.last and len(generated) == self.max_tokens - 1:
            forced = list(self.last)
        if forced:
            scores[:] = -np.inf
            scores[forced] = 0.0
        if self.decay is not None and self.ends and len(generated) > self.decay[0]:
            ends = list(self.ends)
            grown = np.abs(scores[ends]) * np.float32(self.decay[1] ** (len(generated) - self.decay[0]) - 1)
            scores[ends] += np.where(np.isfinite(scores[ends]), grown, 0.0)
        scores[self._suppressed(len(generated))] = -np.inf

    def banned_tokens(self, prompt: "Sequence[int]", generated: "Sequence[int]") -> "list[int]":
        """Return the tokens that must not come next."""
        return [*self._banned(prompt, generated), *self._suppressed(len(generated))]

    def _suppressed(self, generated: int) -> "list[int]":
        return [*self.suppressed, *(self.begin_suppressed if generated == self.begin else ())]

    def _banned(self, prompt: "Sequence[int]", generated: "Sequence[int]") -> "list[int]":
        tokens = [*prompt, *generated]
        banned = list(self.ends) if len(generated) < self.options.min_tokens else []
        size = self.options.no_repeat_ngram_size
        if size and len(tokens) + 1 >= size:
            banned.extend(_continuations(tokens, size).get(_tail(tokens, size), ()))
        size = self.options.encoder_no_repeat_ngram_size
        if size and len(tokens) + 1 >= size:
            banned.extend(self._source_ngrams.get(_tail(tokens, size), ()))
        for size, ends in self._bad_ends.items():
            if len(tokens) + 1 >= size:
                banned.extend(ends.get(_tail(tokens, size), ()))
        return banned


def make_rules(
    always: TokenRules,
    options: RequestOptions,
    ends: "tuple[int, ...]",
    bad_words: "tuple[tuple[int, ...], ...]" = (),
    source: "tuple[int, ...]" = (),
    first: "int | None" = None,
    max_tokens: int = 0,
) -> Rules:
    """Return the rules of a request: its own, and `always`, those of the checkpoint's generation_config."""
    return Rules(
        options,
        ends,
        tuple(sorted({*bad_words, *map(tuple, always.bad_words)} - {()})),
        source,
        first,
        tuple(always.last),
        max_tokens,
        tuple((tuple(entry.tokens), entry.bias) for entry in always.sequence_bias),
        tuple(always.suppressed),
        tuple(always.begin_suppressed),
        (always.decay.start, always.decay.factor) if always.decay else None,
    )


def _penalise(scores: np.ndarray, tokens: "Sequence[int]", penalty: float) -> None:
    """Make each of `tokens` less likely by the factor `penalty`, whatever the sign of its score."""
    seen = np.unique(np.array(tokens, dtype=np.int64))
    values = scores[seen]
    scores[seen] = np.where(values < 0, values * penalty, values / penalty)


def _follows(tokens: "Sequence[int]", word: "Sequence[int]") -> bool:
    """Return True if the next token can complete `word`."""
    return len(tokens) + 1 >= len(word) and _tail(tokens, len(word)) == tuple(word[:-1])


def _continuations(tokens: "Sequence[int]", size: int) -> "dict[tuple[int, ...], list[int]]":
    """Map each run of `size` - 1 tokens to the tokens that followed it."""
    by_context: "dict[tuple[int, ...], list[int]]" = {}
    for start in range(len(tokens) - size + 1):
        by_context.setdefault(tuple(tokens[start : start + size - 1]), []).append(tokens[start + size - 1])
    return by_context


def _ends_by_beginning(
    words: "Sequence[Sequence[int]]",
) -> "dict[int, dict[tuple[int, ...], list[int]]]":
    """Return the last tokens of `words`, keyed by word length and then by all but the last token."""
    by_beginning: "dict[int, dict[tuple[int, ...], list[int]]]" = {}
    for word in words:
        by_beginning.setdefault(len(word), {}).setdefault(tuple(word[:-1]), []).append(word[-1])
    return by_beginning


def _tail(tokens: "Sequence[int]", size: int) -> "tuple[int, ...]":
    """Return the last `size` - 1 tokens."""
    return tuple(tokens[len(tokens) - size + 1 :]) if size > 1 else ()
