"""What the decode loop counts; Triton's metrics are made of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Stats:
    """Counts since the start, and what runs now."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    requests: int = 0
    failures: int = 0
    steps: int = 0
    first_token_seconds: float = 0.0
    first_tokens: int = 0
    token_seconds: float = 0.0
    later_tokens: int = 0
    encoded_tokens: int = 0
    encoder_calls: int = 0
    guessed_tokens: int = 0  # by prompt lookup
    right_guesses: int = 0  # of those tokens
    drafted_tokens: int = 0  # by a draft model
    right_drafts: int = 0  # of those tokens
    moved_positions: int = 0  # of beams' keys and values
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    slots: int = 0
    healthy: int = 1
    loaded_timestamp_seconds: float = field(default_factory=time.time)

    def count_guess(self, tokens: int, right: int, drafted: bool) -> None:
        """A guess of so many tokens was verified, of which so many were right."""
        if drafted:
            self.drafted_tokens += tokens
            self.right_drafts += right
        else:
            self.guessed_tokens += tokens
            self.right_guesses += right
