"""What changes scores before a token is chosen: penalties, biases, bans, and tokens that must come.

As transformers' logits processors, in its order. Knows token ids of one row; knows nothing about how one is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .options import Options


@dataclass(frozen=True)
class Rules:
    """Of one request. `ends` are the tokens that end it, `last` those forced at its `max_tokens`-th token."""

    options: Options
    ends: "tuple[int, ...]" = ()
    bad_words: "tuple[tuple[int, ...], ...]" = ()
    source: "tuple[int, ...]" = ()  # of an encoder-decoder model: what the encoder read
    first: "int | None" = None  # the token that every answer begins with
    last: "tuple[int, ...]" = ()
    max_tokens: int = 0
    _source_ngrams: "dict[tuple[int, ...], list[int]]" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        size = self.options.encoder_no_repeat_ngram_size
        object.__setattr__(self, "_source_ngrams", _continuations(self.source, size) if size else {})

    def idle(self, generated: int) -> bool:
        """Whether scores stay as they are after `generated` tokens."""
        options = self.options
        return (
            options.repetition_penalty == 1
            and not options.presence_penalty
            and not options.frequency_penalty
            and not options.logit_bias
            and not options.no_repeat_ngram_size
            and not options.encoder_no_repeat_ngram_size
            and not self.bad_words
            and generated >= options.min_tokens
            and not (generated == 0 and self.first is not None)
            and not (generated == self.max_tokens - 1 and self.last)
        )

    def apply(self, scores: np.ndarray, prompt: "Sequence[int]", generated: "Sequence[int]") -> None:
        """In place, (vocabulary,): what was said already, what is wanted more or less, what must or must not come."""
        options = self.options
        if options.repetition_penalty != 1:
            seen = np.unique(np.array([*prompt, *generated], dtype=np.int64))
            values = scores[seen]
            penalty = options.repetition_penalty
            scores[seen] = np.where(values < 0, values * penalty, values / penalty)
        if generated and (options.presence_penalty or options.frequency_penalty):
            seen, counts = np.unique(np.array(generated, dtype=np.int64), return_counts=True)
            scores[seen] -= options.presence_penalty + options.frequency_penalty * counts.astype(np.float32)
        for token, value in options.logit_bias.items():
            scores[token] += value
        scores[self._banned([*prompt, *generated])] = -np.inf
        if len(generated) < options.min_tokens:
            scores[list(self.ends)] = -np.inf
        forced = [self.first] if not generated and self.first is not None else []
        if self.last and len(generated) == self.max_tokens - 1:
            forced = list(self.last)
        if forced:
            scores[:] = -np.inf
            scores[forced] = 0.0

    def _banned(self, tokens: "list[int]") -> "list[int]":
        banned: "list[int]" = []
        size = self.options.no_repeat_ngram_size
        if size and len(tokens) + 1 >= size:
            banned.extend(_continuations(tokens, size).get(_tail(tokens, size), ()))
        size = self.options.encoder_no_repeat_ngram_size
        if size and len(tokens) + 1 >= size:
            banned.extend(self._source_ngrams.get(_tail(tokens, size), ()))
        for word in self.bad_words:
            if _tail(tokens, len(word)) == word[:-1]:
                banned.append(word[-1])
        return banned


def _continuations(tokens: "Sequence[int]", size: int) -> "dict[tuple[int, ...], list[int]]":
    """What followed each run of `size` - 1 tokens."""
    found: "dict[tuple[int, ...], list[int]]" = {}
    for start in range(len(tokens) - size + 1):
        found.setdefault(tuple(tokens[start : start + size - 1]), []).append(tokens[start + size - 1])
    return found


def _tail(tokens: "Sequence[int]", size: int) -> "tuple[int, ...]":
    """The last `size` - 1 tokens."""
    return tuple(tokens[len(tokens) - size + 1 :]) if size > 1 else ()
