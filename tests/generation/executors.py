"""A decoder small enough to follow: a real executor whose cache decides every answer, and no graph."""

from __future__ import annotations

import numpy as np

from builder.runtime.generation.executor import Executor, Geometry

VOCABULARY = 50


class SumExecutor(Executor):
    """The next token is a function of all tokens in the slot, read from its cache: a wrong slot, position or
    leftover shows in the text. One layer, one head, one number a position: the token itself.
    """

    def __init__(self, slots: int = 4, max_length: int = 32) -> None:
        super().__init__(Geometry(slots, max_length, VOCABULARY, ((1, 1),)))
        self.calls: list[tuple[int, int, int]] = []  # first slot, rows, new tokens

    def run(self, first: int, tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        rows, new = tokens.shape
        self.calls.append((first, rows, new))
        logits = np.zeros((rows, VOCABULARY), np.float32)
        for row, length in enumerate(lengths.tolist()):
            cache = self.arena["key_0"][first + row, 0, :, 0]
            cache[length : length + new] = tokens[row]
            held = cache[: length + new].astype(np.int64)
            logits[row, next_token(held.tolist())] = 9.0
            logits[row] += np.linspace(0, 1, VOCABULARY)
        return logits


def next_token(tokens: list[int]) -> int:
    """What SumExecutor says after `tokens`."""
    return (sum((place + 3) * token for place, token in enumerate(tokens)) + len(tokens)) % VOCABULARY


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]
