"""Decide how far a draft model runs ahead of one row, by how often it was right lately.

After a guess that was right throughout, the next is two tokens longer; after any other, one token shorter. This is the
schedule "heuristic" of transformers' assisted generation (generation/candidate_generator.py). A wrong guess of one
token is followed by a pause, each twice the last. The module knows numbers alone.
"""

from __future__ import annotations

FIRST, MOST = 4, 7  # tokens of a guess
SHORTEST_PAUSE, LONGEST_PAUSE = 8, 256  # tokens


def longer(pause: int) -> int:
    """Return the pause in tokens after a wrong guess; `pause` is the one before, 0 if there was none."""
    return min(max(2 * pause, SHORTEST_PAUSE), LONGEST_PAUSE)


class Pace:
    """Length and pauses of the draft model's guesses for one row."""

    def __init__(self) -> None:
        self.size, self.pause = FIRST, 0
        self.guessed_at, self.resumes = 0, 0  # tokens of the answer: when it last guessed, and when it may guess again

    def ahead(self, generated: int) -> int:
        """Return how many tokens to guess after `generated` tokens of an answer; 0 during a pause."""
        self.guessed_at = generated
        return self.size if generated >= self.resumes else 0

    def learn(self, guessed: int, right: int) -> None:
        """Adjust to the last guess, of whose `guessed` tokens `right` were right."""
        if right == guessed:
            self.size, self.pause = min(self.size + 2, MOST), 0
        elif self.size > 1:
            self.size -= 1
        else:
            self.pause = longer(self.pause)
            self.resumes = self.guessed_at + self.pause
