"""How far a draft model runs ahead of one row: as far as it was right of late.

Two tokens further after a guess of which all were right, one less far after another, as in transformers' assisted
generation (generation/candidate_generator.py, the schedule "heuristic"). A guess of one token that is wrong is followed
by a pause, each twice the last. Knows numbers alone.
"""

from __future__ import annotations

FIRST, MOST = 4, 7  # tokens of a guess
SHORTEST_PAUSE, LONGEST_PAUSE = 8, 256  # tokens


def longer(pause: int) -> int:
    """The pause after a wrong guess, in tokens, where the last one was `pause`; 0: there was none."""
    return min(max(2 * pause, SHORTEST_PAUSE), LONGEST_PAUSE)


class Pace:
    """Of one row."""

    def __init__(self) -> None:
        self.size, self.pause = FIRST, 0
        self.guessed_at, self.resumes = 0, 0  # tokens of the answer: when it last guessed, and when it may again

    def ahead(self, generated: int) -> int:
        """How many tokens to guess after `generated` tokens of an answer; 0 while it pauses."""
        self.guessed_at = generated
        return self.size if generated >= self.resumes else 0

    def learn(self, guessed: int, right: int) -> None:
        """Of the last guess so many tokens were right."""
        if right == guessed:
            self.size, self.pause = min(self.size + 2, MOST), 0
        elif self.size > 1:
            self.size -= 1
        else:
            self.pause = longer(self.pause)
            self.resumes = self.guessed_at + self.pause
