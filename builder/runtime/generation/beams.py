"""Beam search over one request: from the logits of its beams to the beams that go on, and the hypotheses that ended.

The rules are those of transformers' `generate`: candidates are (1 + end tokens) x beams, only the best of them may
end, an ended hypothesis is scored by its log-probability over length ** length_penalty, and `early_stopping` says when
no better one is to be expected. Knows token ids and scores; knows nothing about slots or caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .processors import Rules

GROUPS = 1024  # of tokens, whose maxima are looked at first


@dataclass(frozen=True)
class Hypothesis:
    """One answer. `score`: its log-probability over length ** length_penalty."""

    tokens: "tuple[int, ...]"
    score: float
    finish_reason: str


class BeamSearch:
    """The state of one request's beams: what each has said, and its log-probability."""

    def __init__(self, rules: Rules, prompt: "Sequence[int]", end_ids: "frozenset[int]") -> None:
        self.rules = rules
        self.prompt = prompt
        self.end_ids = end_ids
        self.width = rules.options.num_beams
        self.said: "list[list[int]]" = [[]]
        self.scores = np.zeros(1, np.float32)
        self.ended: "list[Hypothesis]" = []  # the best `width`, best first
        self.done = False

    def step(self, logits: "Sequence[np.ndarray]") -> "list[int]":
        """Extend the beams by one token; `logits`: (vocabulary,) of each. Returns of each new beam the one it extends.

        At the last step `done` is set, and what is returned means nothing. Raises RuntimeError where no token may come.
        """
        candidates = max(2, 1 + len(self.end_ids)) * self.width
        length = len(self.said[0])
        beams, tokens, scores = self._candidates(logits, candidates)
        full = length + 1 >= self.rules.max_tokens
        ending = np.array([full or token in self.end_ids for token in tokens.tolist()])
        self._end(beams[: self.width], tokens[: self.width], scores[: self.width], ending[: self.width])
        going = np.flatnonzero(~ending)[: self.width]
        if full or not len(going):
            self.done = True
            return []
        self.said = [[*self.said[beam], token] for beam, token in zip(beams[going].tolist(), tokens[going].tolist())]
        self.scores = scores[going]
        self.done = not self._may_improve()
        return beams[going].tolist()

    def _candidates(self, logits: "Sequence[np.ndarray]", count: int) -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
        """The best continuations of all beams, best first: beam, token, and log-probability of the whole."""
        found = []
        for beam, (row, said) in enumerate(zip(logits, self.said)):
            total = log_sum_exp(row)
            if self.rules.idle(len(said)):
                tokens = largest(row, count)
                logprobs = row[tokens] - total
            else:
                changed = row - total
                self.rules.apply(changed, self.prompt, said)
                if self.rules.options.renormalize_logits:
                    changed -= log_sum_exp(changed)
                tokens = largest(changed, count)
                logprobs = changed[tokens]
            found.append((np.full(len(tokens), beam), tokens, logprobs + self.scores[beam]))
        beams, tokens, scores = (np.concatenate(parts) for parts in zip(*found))
        order = np.argsort(-scores, kind="stable")[:count]
        order = order[np.isfinite(scores[order])]  # a token that must come leaves no other
        if not len(order):
            raise RuntimeError("the options of this request forbid every token")
        return beams[order], tokens[order], scores[order]

    def _end(self, beams: np.ndarray, tokens: np.ndarray, scores: np.ndarray, ending: np.ndarray) -> None:
        options = self.rules.options
        if options.early_stopping == "true" and len(self.ended) == self.width:
            return
        for place in np.flatnonzero(ending).tolist():
            token, said = int(tokens[place]), self.said[beams[place]]
            reason = "stop" if token in self.end_ids else "length"
            score = float(scores[place]) / (len(said) + 1) ** options.length_penalty
            self.ended.append(Hypothesis((*said, token), score, reason))
        self.ended = sorted(self.ended, key=lambda hypothesis: -hypothesis.score)[: self.width]

    def _may_improve(self) -> bool:
        """Whether a running beam might still end better than the worst that is kept."""
        if len(self.ended) < self.width:
            return True
        options = self.rules.options
        if options.early_stopping == "true":
            return False
        length = len(self.said[0])
        if options.early_stopping == "never" and options.length_penalty > 0:
            length = self.rules.max_tokens
        return float(self.scores[0]) / length**options.length_penalty > self.ended[-1].score


def log_sum_exp(row: np.ndarray) -> np.float32:
    """The logarithm of the sum of exponentials of (vocabulary,)."""
    best = row.max()
    shifted = row - best
    np.exp(shifted, out=shifted)
    total: np.float32 = best + np.log(np.add.reduce(shifted))
    return total


def largest(scores: np.ndarray, count: int) -> np.ndarray:
    """The places of the `count` largest of (vocabulary,), largest first.

    Each of them lies in one of the `count` groups with the largest maxima, so only those are looked into.
    """
    rows = len(scores) // GROUPS
    if rows < 4 or count >= GROUPS // 2:
        places = np.arange(len(scores))
        values = scores
    else:
        grouped = scores[: rows * GROUPS].reshape(rows, GROUPS)
        groups = grouped.max(axis=0).argpartition(GROUPS - count)[GROUPS - count :]
        places = np.concatenate([_grid(rows, groups), np.arange(rows * GROUPS, len(scores))])
        values = scores[places]
    if count < len(places):
        best = values.argpartition(len(values) - count)[len(values) - count :]
        places, values = places[best], values[best]
    return places[(-values).argsort(kind="stable")]


def _grid(rows: int, groups: np.ndarray) -> np.ndarray:
    return (np.arange(0, rows * GROUPS, GROUPS)[:, None] + groups).ravel()


def reorder(slots: "Sequence[int]", parents: "Sequence[int]") -> "tuple[list[int], list[tuple[int, int]]]":
    """Where the new beams go, given the slots of the old ones and the spare ones after them.

    A beam that goes on stays where it is; only a second child of one parent moves, to a slot that nobody goes on in.
    Returns the slots of the new beams, the spare ones after them, and the copies (source, target) that this takes.
    """
    spare = [slot for beam, slot in enumerate(slots) if beam not in set(parents)]
    placed: "list[int]" = []
    copies = []
    for parent in parents:
        slot = slots[parent]
        if slot in placed:
            copies.append((slot, spare.pop(0)))
            slot = copies[-1][1]
        placed.append(slot)
    return [*placed, *spare], copies
