"""Decide how many tokens a draft model proposes for one sequence, from how many were accepted lately.

After a proposal that was accepted whole, the next is two tokens longer; after any other, one token shorter. This is the
schedule "heuristic" of transformers' assisted generation (generation/candidate_generator.py). After a rejected proposal
of one token comes a pause, twice as long each time.
"""

from __future__ import annotations

INITIAL_LENGTH, MAX_LENGTH = 4, 7  # tokens of a proposal
MIN_PAUSE, MAX_PAUSE = 8, 256  # tokens


def next_pause(pause: int) -> int:
    """Return the pause in tokens after a rejection; `pause` is the one before, 0 if there was none."""
    return min(max(2 * pause, MIN_PAUSE), MAX_PAUSE)


class DraftLength:
    """Length and pauses of the draft model's proposals for one sequence."""

    def __init__(self) -> None:
        self.length, self.pause = INITIAL_LENGTH, 0
        self.proposed_at, self.resumes_at = 0, 0  # in tokens of the answer

    def next(self, generated: int) -> int:
        """Return how many tokens to propose after `generated` tokens of an answer; 0 during a pause."""
        self.proposed_at = generated
        return self.length if generated >= self.resumes_at else 0

    def learn(self, proposed: int, accepted: int) -> None:
        """Adjust to the last proposal."""
        if accepted == proposed:
            self.length, self.pause = min(self.length + 2, MAX_LENGTH), 0
        elif self.length > 1:
            self.length -= 1
        else:
            self.pause = next_pause(self.pause)
            self.resumes_at = self.proposed_at + self.pause
