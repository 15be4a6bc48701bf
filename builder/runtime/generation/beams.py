"""Run beam search for one request: choose the beams that continue, and the hypotheses that end, from their logits.

The rules are those of transformers' `generate`: candidates are (1 + end tokens) x beams, only the best of them may end,
an ended hypothesis is scored by its log-probability over length ** length_penalty, and `early_stopping` decides when to
stop looking for a better one. Knows token ids and scores; knows nothing about slots or caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .executors.base import ScoredCandidates
from .processors import Rules
from .scores import best_of, highest, log_sum_exp


@dataclass(frozen=True)
class Hypothesis:
    """Ended answer. `score`: its log-probability over length ** length_penalty."""

    tokens: "tuple[int, ...]"
    score: float
    finish_reason: str


class BeamSearch:
    """State of one request's beams: the tokens of each and its log-probability."""

    def __init__(self, rules: Rules, prompt: "Sequence[int]", end_ids: "frozenset[int]") -> None:
        self.rules = rules
        self.prompt = prompt
        self.end_ids = end_ids
        self.width = rules.options.num_beams
        self.generated: "list[list[int]]" = [[]]
        self.scores = np.zeros(1, np.float32)
        self.count = max(2, 1 + len(end_ids)) * self.width  # continuations to consider
        self.banned: "list[list[int]]" = [[]]  # banned tokens of each beam, set by `candidates_needed`
        self.ended: "list[Hypothesis]" = []  # the best `width`, best first
        self.is_done = False

    def candidates_needed(self) -> int:
        """Return how many candidates of each beam are enough for the next step, banned ones included; 0 for all."""
        rules, length = self.rules, len(self.generated[0])
        self.banned = [[]] * len(self.generated)
        if rules.is_idle(length):
            return self.count
        if rules.options.renormalize_logits or not rules.only_bans(length):
            return 0
        self.banned = [rules.banned_tokens(self.prompt, generated) for generated in self.generated]
        return self.count + max(map(len, self.banned))

    def step(self, logits: "Sequence[np.ndarray] | ScoredCandidates") -> "list[int]":
        """Extend the beams by one token; return, for each new beam, the index of the beam that it extends.

        `logits`: (vocabulary,) of each beam; or the highest logits of each beam, at least `candidates_needed`. The last
        step sets `is_done`; ignore its return value. Raises RuntimeError if every token is banned.
        """
        length = len(self.generated[0])
        beams, tokens, scores = self._candidates(logits)
        full = length + 1 >= self.rules.max_tokens
        ending = np.array([full or token in self.end_ids for token in tokens.tolist()])
        self._end(beams[: self.width], tokens[: self.width], scores[: self.width], ending[: self.width])
        running = np.flatnonzero(~ending)[: self.width]
        if full or not len(running):
            self.is_done = True
            return []
        self.generated = [
            [*self.generated[beam], token] for beam, token in zip(beams[running].tolist(), tokens[running].tolist())
        ]
        self.scores = scores[running]
        self.is_done = not self._may_improve()
        return beams[running].tolist()

    def _candidates(
        self, logits: "Sequence[np.ndarray] | ScoredCandidates"
    ) -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
        """Return the best continuations of all beams, best first: beam, token, and log-probability of the whole."""
        best = self._from_candidates(logits) if isinstance(logits, ScoredCandidates) else self._from_logits(logits)
        if not len(best[0]):
            raise RuntimeError("the options of this request forbid every token; leave some of its bans or biases out")
        return best

    def _from_logits(self, logits: "Sequence[np.ndarray]") -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
        scratch = np.empty_like(logits[0])
        rows, totals = zip(*(self._scored(row, generated, scratch) for row, generated in zip(logits, self.generated)))
        return highest(rows, np.array(totals, np.float32), self.scores, self.count)

    def _from_candidates(self, likeliest: ScoredCandidates) -> "tuple[np.ndarray, np.ndarray, np.ndarray]":
        values = likeliest.logits - likeliest.totals + self.scores[:, None]
        for row, banned in enumerate(map(set, self.banned)):
            if banned:
                values[row, [token in banned for token in likeliest.tokens[row].tolist()]] = -np.inf
        return best_of(values, likeliest.logits, likeliest.tokens, self.count)

    def _scored(self, row: np.ndarray, generated: "list[int]", scratch: np.ndarray) -> "tuple[np.ndarray, np.float32]":
        """Return the scores of a beam's next tokens, (vocabulary,), and their log-sum-exp.

        The scores minus the second value are log-probabilities.
        """
        total = log_sum_exp(row, scratch)
        if self.rules.is_idle(len(generated)):
            return row, total
        only_bans = self.rules.only_bans(len(generated))
        changed, normaliser = (row.copy(), total) if only_bans else (row - total, np.float32(0))
        self.rules.apply(changed, self.prompt, generated)
        return changed, log_sum_exp(changed, scratch) if self.rules.options.renormalize_logits else normaliser

    def _end(self, beams: np.ndarray, tokens: np.ndarray, scores: np.ndarray, ending: np.ndarray) -> None:
        options = self.rules.options
        if options.early_stopping == "true" and len(self.ended) == self.width:
            return
        for index in np.flatnonzero(ending).tolist():
            token, generated = int(tokens[index]), self.generated[beams[index]]
            reason = "stop" if token in self.end_ids else "length"
            score = float(scores[index]) / (len(generated) + 1) ** options.length_penalty
            self.ended.append(Hypothesis((*generated, token), score, reason))
        self.ended = sorted(self.ended, key=lambda hypothesis: -hypothesis.score)[: self.width]

    def _may_improve(self) -> bool:
        """Return True if a running beam might still end better than the worst hypothesis that is kept."""
        if len(self.ended) < self.width:
            return True
        options = self.rules.options
        if options.early_stopping == "true":
            return False
        length = len(self.generated[0])
        if options.early_stopping == "never" and options.length_penalty > 0:
            length = self.rules.max_tokens
        return float(self.scores[0]) / length**options.length_penalty > self.ended[-1].score


def reorder(slots: "Sequence[int]", parents: "Sequence[int]") -> "tuple[list[int], list[tuple[int, int]]]":
    """Assign slots to the new beams, given `slots` of the old ones and the spare ones after them.

    A beam that continues keeps its slot; only a further child of the same parent moves, to a slot without a continuing
    beam. Returns the slots of the new beams, the spare ones after them, and the necessary copies (source, target).
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
