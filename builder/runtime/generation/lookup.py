"""Guess the next tokens of a text from what followed the same tokens earlier in it.

This is prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding). A guess runs in the
same step as the token that is certain, and each of its tokens is kept if it equals the token that is chosen. The text
is the same as without guesses, and summaries and extracts take fewer steps. Knows token ids of one row; does not know
how a token is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from .pace import longer

SAME = 3  # tokens that must match before a guess
LEAST, MOST = 3, 15  # tokens of a guess


class Lookup:
    """Guesses for one row: longer after a guess that was right; after a wrong one a pause, each twice the last."""

    def __init__(self, tokens: "Sequence[int]") -> None:
        self.tokens: "list[int]" = []
        self.places: "dict[tuple[int, ...], int]" = {}  # position after the last occurrence of these tokens
        self.candidate: "int | None" = None
        self.size, self.pause, self.waiting = LEAST, 0, 0
        self.extend(tokens)

    def extend(self, tokens: "Sequence[int]") -> None:
        """Append `tokens` to the text."""
        for token in tokens:
            self.tokens.append(token)
            last = tuple(self.tokens[-SAME:])
            self.candidate = self.places.get(last)
            self.places[last] = len(self.tokens)
        self.waiting = max(0, self.waiting - len(tokens))

    def guess(self, most: int) -> "list[int]":
        """Return up to `most` tokens that may come next, most often none."""
        if self.candidate is None or self.waiting:
            return []
        return self.tokens[self.candidate : self.candidate + min(self.size, most)]

    def learn(self, guessed: int, right: int) -> None:
        """Adjust to the last guess, of whose `guessed` tokens `right` were right."""
        if right == guessed:
            self.size, self.pause = min(2 * self.size + 1, MOST), 0
        elif right:
            self.size, self.pause = max(LEAST, right), 0
        else:
            self.size, self.pause = LEAST, longer(self.pause)
            self.waiting = self.pause
