"""Make the inputs that one call gives an encoder's engine: int64 arrays by name, (rows, longest row).

With adapters, also the row of the stacks for each row of the call, (rows,). Knows which part of a row each input takes,
padding and buckets; knows nothing about tasks or engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..contract import EncoderServing
from ..lora import LORA_ROWS, LoraStacks
from .cutting import smallest_bucket

if TYPE_CHECKING:
    from .task import Row  # imports tokenizers, which an image that pulls models does not have

TASK = "task"  # the source of an input that the task makes: Row.feeds has it
TOKEN_SOURCES = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}  # of an Encoding


def sources(names: "Sequence[str]") -> "dict[str, str]":
    """Return what fills each input of a graph: an attribute of an encoding, or TASK."""
    return {name: TOKEN_SOURCES.get(name, TASK) for name in names}


class CallInputs:
    """Inputs of the calls of the front that `serving` describes, whose graph reads the stacks `lora`."""

    def __init__(self, serving: EncoderServing, lora: "LoraStacks | None" = None) -> None:
        self.serving, self.lora = serving, lora

    def of(self, rows: "Sequence[Row]") -> "tuple[dict[str, np.ndarray], tuple[int, int]]":
        """Pad rows to the longest, or to a bucket. Return each input of the engine, and the rows and tokens of each.

        The adapters of the rows are written into the stacks: run the call before the next one is made.
        """
        call = len(rows), max(1, *(len(row.encoding) for row in rows))
        bucket = smallest_bucket(call, self.serving.batching.buckets)
        inputs = {}
        for name, source in self.serving.inputs.items():
            values = [row.feeds[name] if source == TASK else getattr(row.encoding, source) for row in rows]
            array = pad(values, self.serving.pad.get(name, 0))
            inputs[name] = array if bucket == call else self._fill(name, array, bucket)
        if self.lora is not None:  # the engines with adapters need no buckets
            inputs[LORA_ROWS] = self.lora.rows_of([row.adapter for row in rows])
        return inputs, bucket

    def warm_up(self) -> "Iterator[dict[str, np.ndarray]]":
        """Yield the inputs of serving.json's warm-up calls, and of a row as long as those of each bucket of several."""
        calls = [self._one_row(row) for row in self.serving.warm_up]
        yield from calls
        for length in sorted({tokens for rows, tokens in self.serving.batching.buckets if rows > 1}):
            for call in calls[-1:]:
                yield {
                    name: array if self.serving.inputs[name] == TASK else np.resize(array, (1, length))
                    for name, array in call.items()
                }

    def _one_row(self, row: "Mapping[str, Sequence[int]]") -> "dict[str, np.ndarray]":
        return {name: np.array([row[name]], dtype=np.int64) for name in self.serving.inputs}

    def _fill(self, name: str, array: np.ndarray, shape: "tuple[int, int]") -> np.ndarray:
        """Place `array` in the corner of `shape`: pad its rows, if they are tokens, and repeat the last."""
        longer = 0 if self.serving.inputs[name] == TASK else shape[1] - array.shape[1]
        wider = np.pad(array, ((0, 0), (0, longer)), constant_values=self.serving.pad.get(name, 0))
        return np.pad(wider, ((0, shape[0] - array.shape[0]), (0, 0)), mode="edge")


def pad(rows: "Sequence[Sequence[int]]", value: int) -> np.ndarray:
    """Return `rows` as one array, with `value` after the shorter ones."""
    padded = np.full((len(rows), max(1, max(len(row) for row in rows))), value, dtype=np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded
