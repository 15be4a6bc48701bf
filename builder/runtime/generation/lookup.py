"""Guesses how a text goes on: as it did when the same tokens came last.

This is prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding). A guess is run with
the token that is certain, and each of its tokens is kept if it is the one that is chosen: the text is what it would be
without, and summaries and extracts take fewer steps. Knows token ids of one row; knows nothing about how one is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from .pace import longer

SAME = 3  # tokens that must have come before
LEAST, MOST = 3, 15  # tokens of a guess


class Lookup:
    """Of one row. A guess that was right is followed by a longer one, a wrong one by a pause, each twice the last."""

    def __init__(self, tokens: "Sequence[int]") -> None:
        self.tokens: "list[int]" = []
        self.places: "dict[tuple[int, ...], int]" = {}  # what came after these tokens, when they came last
        self.candidate: "int | None" = None
        self.size, self.pause, self.waiting = LEAST, 0, 0
        self.extend(tokens)

    def extend(self, tokens: "Sequence[int]") -> None:
        """`tokens` came."""
        for token in tokens:
            self.tokens.append(token)
            last = tuple(self.tokens[-SAME:])
            self.candidate = self.places.get(last)
            self.places[last] = len(self.tokens)
        self.waiting = max(0, self.waiting - len(tokens))

    def guess(self, most: int) -> "list[int]":
        """Up to `most` tokens that may come next; none is the rule."""
        if self.candidate is None or self.waiting:
            return []
        return self.tokens[self.candidate : self.candidate + min(self.size, most)]

    def learn(self, guessed: int, right: int) -> None:
        """Of the last guess so many tokens were right."""
        if right == guessed:
            self.size, self.pause = min(2 * self.size + 1, MOST), 0
        elif right:
            self.size, self.pause = max(LEAST, right), 0
        else:
            self.size, self.pause = LEAST, longer(self.pause)
            self.waiting = self.pause
