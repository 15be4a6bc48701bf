"""Define the metrics of the decode loop, which Triton publishes on /metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

FAMILIES = (
    ("generated_tokens", "COUNTER", "Tokens generated"),
    ("prompt_tokens", "COUNTER", "Tokens of prompts"),
    ("reused_tokens", "COUNTER", "Tokens of prompts whose keys and values were still there"),
    ("requests", "COUNTER", "Requests accepted"),
    ("failures", "COUNTER", "Requests that failed or ran out of time"),
    ("steps", "COUNTER", "Turns of the decode loop"),
    ("first_token_seconds", "COUNTER", "Time from arrival to first token, summed over first_tokens"),
    ("first_tokens", "COUNTER", "Requests that got a first token"),
    ("token_seconds", "COUNTER", "Time from the first token to the last, summed over later_tokens"),
    ("later_tokens", "COUNTER", "Tokens after the first of sequences that ended"),
    ("encoded_tokens", "COUNTER", "Tokens that an encoder read"),
    ("encoder_calls", "COUNTER", "Runs of the encoder"),
    ("guessed_tokens", "COUNTER", "Tokens that were run ahead because the text may repeat itself"),
    ("right_guesses", "COUNTER", "Of those, tokens that were kept"),
    ("drafted_tokens", "COUNTER", "Tokens that were run ahead because a draft model said them"),
    ("right_drafts", "COUNTER", "Of those, tokens that were kept"),
    ("moved_positions", "COUNTER", "Positions of the cache copied because a beam split"),
    ("preemptions", "COUNTER", "Sequences that gave way to others when the cache was full, and were computed again"),
    ("running", "GAUGE", "Sequences in slots"),
    ("waiting", "GAUGE", "Sequences in the queue"),
    ("slots", "GAUGE", "Slots of the cache"),
    ("cache_usage", "GAUGE", "Share of the cache that running sequences have, 0 to 1: of its blocks, or of its slots"),
    ("healthy", "GAUGE", "1 while the decode loop runs, 0 once it failed"),
    ("loaded_timestamp_seconds", "GAUGE", "When the model was loaded, in seconds since 1970"),
)


@dataclass
class Stats:
    """Counters since the start, and gauges of the current state."""

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
    right_guesses: int = 0  # of the guessed tokens
    drafted_tokens: int = 0  # by a draft model
    right_drafts: int = 0  # of the drafted tokens
    moved_positions: int = 0  # of beams' keys and values
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    slots: int = 0
    cache_usage: float = 0.0
    healthy: int = 1
    loaded_timestamp_seconds: float = field(default_factory=time.time)

    def count_proposal(self, tokens: int, accepted: int, drafted: bool) -> None:
        """Count `tokens` speculative tokens, of which `accepted` were accepted."""
        if drafted:
            self.drafted_tokens += tokens
            self.right_drafts += accepted
        else:
            self.guessed_tokens += tokens
            self.right_guesses += accepted

    def values(self) -> dict[str, float]:
        """Return the current value of each family."""
        return {name: float(getattr(self, name)) for name, _, _ in FAMILIES}
