"""Times of encoder-decoders that answer groups of texts.

Imports only Python's own library, because it runs in the environments of the peers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any


def pad_right(requests: list[dict[str, Any]]) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids and the attention mask of the requests' texts, padded to the longest with 0."""
    lengths = [len(request["source"]) for request in requests]
    ids = [request["source"] + [0] * (max(lengths) - length) for request, length in zip(requests, lengths, strict=True)]
    return ids, [[1] * length + [0] * (max(lengths) - length) for length in lengths]


def time_groups(
    work: dict[str, Any], answer: Callable[[list[dict[str, Any]]], object], warm_up_tokens: int = 4
) -> None:
    """Answer the requests of `work` in groups of its concurrency, and print the figures as JSON."""
    requests, size = work["requests"], work["concurrency"]
    answer([{**requests[0], "new_tokens": warm_up_tokens}])
    start = time.perf_counter()
    for first in range(0, len(requests), size):
        answer(requests[first : first + size])
    seconds = time.perf_counter() - start
    tokens = sum(request["new_tokens"] for request in requests)
    print(json.dumps({"tokens_per_s": tokens / seconds, "answer_ms": seconds / len(requests) * size * 1000}))
