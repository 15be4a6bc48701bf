"""Measure the memory that an encoder's largest calls take beside its weights.

ONNX Runtime's arena and OpenVINO's memory pools keep what a call took for the next one. Calls of other shapes than the
two largest may add to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from builder.engines import Infer
from builder.graphs.export.rows import Rows
from builder.runtime.contract import Batching
from builder.runtime.process_memory import resident, trim

MIN_ROW_TOKENS = 16  # of a call of many rows


def measured_token_bytes(infer: Infer, inputs: Sequence[str], rows: Rows, batching: Batching, max_length: int) -> int:
    """Return the bytes that a graph takes for each token of the largest calls that `batching` allows.

    `infer`: opened for this, and not called before; `inputs`: the names of the graph's inputs.
    """
    shapes = largest_shapes(batching, max_length)
    infer(rows.feeds(inputs, [min(MIN_ROW_TOKENS, max_length)]))  # reads the weights that are still in their file
    trim()
    before = resident()
    for count, length in shapes:
        infer(rows.feeds(inputs, [length] * count))
    used = max(0, resident() - before)
    return -(-used // max(count * length for count, length in shapes))


def largest_shapes(batching: Batching, max_length: int) -> list[tuple[int, int]]:
    """Return (rows, tokens) of a call of many short rows, and of one of the longest; of an engine's buckets if any."""
    if batching.buckets:
        most_rows = max(batching.buckets, key=lambda bucket: (bucket[0], bucket[1]))
        longest = max(batching.buckets, key=lambda bucket: (bucket[1], bucket[0]))
        return [(rows, tokens) for rows, tokens in dict.fromkeys([tuple(most_rows), tuple(longest)])]
    short = min(max_length, max(MIN_ROW_TOKENS, batching.token_budget // batching.max_rows))
    counts = {length: max(1, min(batching.max_rows, batching.token_budget // length)) for length in (short, max_length)}
    return [(count, length) for length, count in counts.items()]
