"""Propose the next tokens of a sequence: those that followed the same tokens earlier in it.

This is prompt lookup decoding (Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding). The proposal is
verified in the step of the next token, and accepted as far as it equals the chosen tokens. Knows token ids of one
sequence; does not know how a token is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

from .draft_length import next_pause

NGRAM = 3  # tokens that must match
MIN_LENGTH, MAX_LENGTH = 3, 15  # tokens of a proposal


class PromptLookup:
    """Proposals for one sequence: longer after an accepted one, with a pause after a rejected one."""

    def __init__(self, tokens: "Sequence[int]") -> None:
        self.tokens: "list[int]" = []
        self.positions: "dict[tuple[int, ...], int]" = {}  # by n-gram: the index after its last occurrence
        self.match: "int | None" = None
        self.length, self.pause, self.waiting = MIN_LENGTH, 0, 0
        self.extend(tokens)

    def extend(self, tokens: "Sequence[int]") -> None:
        for token in tokens:
            self.tokens.append(token)
            ngram = tuple(self.tokens[-NGRAM:])
            self.match = self.positions.get(ngram)
            self.positions[ngram] = len(self.tokens)
        self.waiting = max(0, self.waiting - len(tokens))

    def propose(self, limit: int) -> "list[int]":
        """Return up to `limit` tokens, usually none."""
        if self.match is None or self.waiting:
            return []
        return self.tokens[self.match : self.match + min(self.length, limit)]

    def learn(self, proposed: int, accepted: int) -> None:
        """Adjust to the last proposal."""
        if accepted == proposed:
            self.length, self.pause = min(2 * self.length + 1, MAX_LENGTH), 0
        elif accepted:
            self.length, self.pause = max(MIN_LENGTH, accepted), 0
        else:
            self.length, self.pause = MIN_LENGTH, next_pause(self.pause)
            self.waiting = self.pause
