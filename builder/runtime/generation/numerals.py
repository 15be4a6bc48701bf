"""Limit the numbers of a JSON document to those that readers accept: 64 bits, or doubles with all digits exact.

JSON itself sets no limit, so a model could write 1e999, which many readers make Infinity and others refuse. Knows the
bytes of tokens; knows nothing about grammars.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

MAX_WHOLE_DIGITS = 18  # of a number without decimals: below 2**63
MAX_DIGITS = 15  # of a number with decimals, all of which a double keeps
MAX_EXPONENT_DIGITS = 2
DIGITS = frozenset(b"0123456789")
QUOTE, BACKSLASH, POINT = b'"\\.'
EXPONENT = frozenset(b"eE")
SIGNS = frozenset(b"+-")


class NumeralState(NamedTuple):
    """Place in a document: in a string, between two values, or in a number with its digits counted so far."""

    quoted: bool = False
    escaped: bool = False
    part: str = ""  # of a number: whole, decimals, exponent
    whole: int = 0
    decimals: int = 0
    exponent: int = 0

    def after(self, text: bytes) -> NumeralState:
        """Return the place after `text`."""
        place = self
        for byte in text:
            place = place.after_byte(byte)
        return place

    @property
    def is_too_long(self) -> bool:
        """True within a number of more digits than readers accept."""
        if self.part == "whole":
            return self.whole > MAX_WHOLE_DIGITS
        digits = self.whole + max(1, self.decimals)
        return self.exponent > MAX_EXPONENT_DIGITS or (self.part == "decimals" and digits > MAX_DIGITS)

    def after_byte(self, byte: int) -> NumeralState:
        """Return the place after one byte of text."""
        if self.quoted:
            return NumeralState(quoted=self.escaped or byte != QUOTE, escaped=not self.escaped and byte == BACKSLASH)
        if byte in DIGITS:
            if not self.part:
                return NumeralState(part="whole", whole=1)
            return self._replace(**{self.part: getattr(self, self.part) + 1})
        if self.part == "whole" and byte == POINT:
            return self._replace(part="decimals")
        if self.part and (byte in EXPONENT or (self.part == "exponent" and byte in SIGNS)):
            return self._replace(part="exponent")
        return NumeralState(quoted=byte == QUOTE)


class Numerals:
    """Tokens of one tokeniser that would make a number too long."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        """Read the tokens of `tokenizer`, which is llguidance's; `vocabulary` logits may exceed its tokens."""
        count = min(vocabulary, tokenizer.vocab_size)
        self.texts: "Sequence[bytes]" = [tokenizer.decode_bytes([token]) for token in range(count)]
        self.tokens = [token for token, text in enumerate(self.texts) if POINT in text or DIGITS & set(text)]
        self.too_long = functools.lru_cache(256)(self._too_long)

    def text(self, token: int) -> bytes:
        """Return the bytes of `token`."""
        return self.texts[token] if token < len(self.texts) else b""

    def _too_long(self, place: NumeralState) -> np.ndarray:
        return np.array([token for token in self.tokens if self._passes_limit(place, self.texts[token])], np.int64)

    @staticmethod
    def _passes_limit(place: NumeralState, text: bytes) -> bool:
        for byte in text:
            place = place.after_byte(byte)
            if place.is_too_long:
                return True
        return False
