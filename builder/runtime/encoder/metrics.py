"""Define the metrics of an encoder, which Triton publishes on /metrics."""

from __future__ import annotations

from .pipeline import Counts
from .request_queue import FAMILIES as QUEUE_FAMILIES
from .request_queue import RequestQueue

FAMILIES = (
    ("engine_calls", "COUNTER", "Calls of the engine"),
    ("tokens", "COUNTER", "Tokens of the texts, special tokens included"),
    ("padding_tokens", "COUNTER", "Tokens added to texts to make them as long as their batch mates"),
    *QUEUE_FAMILIES,
    ("loaded_timestamp_seconds", "GAUGE", "When the model was loaded, in seconds since 1970"),
)


def values(counts: Counts, waiting: RequestQueue) -> dict[str, float]:
    """Return the current value of each family except the load time."""
    return {
        "engine_calls": counts.calls,
        "tokens": counts.tokens,
        "padding_tokens": counts.padded_tokens - counts.tokens,
        **waiting.values(),
    }
