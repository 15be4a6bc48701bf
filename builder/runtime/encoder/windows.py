"""Split the tokens of a long text into overlapping windows that a model can read.

Knows encodings; knows nothing about tasks or engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Encoding


@dataclass(frozen=True)
class Window:
    """Part of a text between its special tokens, which the pipeline reads as it reads an Encoding.

    `weight`: how many tokens of the text are its own; a token that several windows share counts in equal parts.
    `start`: its first token, counted from the first that windows do not repeat.
    """

    ids: Sequence[int]
    type_ids: Sequence[int]
    attention_mask: Sequence[int]
    weight: float
    start: int = 0

    def __len__(self) -> int:
        return len(self.ids)


def split(encoding: Encoding, prompt: int, size: int, overlap: int) -> list[Window]:
    """Return the windows of a text: `size` tokens each, the last one fewer, of which neighbours share `overlap`.

    `encoding`: of the whole text, with special tokens and offsets; every window begins and ends with its special
    tokens, and repeats its first `prompt` characters.
    """
    first, last = frame(encoding, prompt)
    starts = _starts(last - first, size, overlap)
    shares = np.zeros(last - first)
    for start in starts:
        shares[start : start + size] += 1
    columns = encoding.ids, encoding.type_ids, encoding.attention_mask  # read once: an encoding copies what is read
    windows = []
    for start in starts:
        begin, end = first + start, min(first + start + size, last)
        ids, type_ids, mask = ([*column[:first], *column[begin:end], *column[last:]] for column in columns)
        windows.append(Window(ids, type_ids, mask, float((1 / shares[start : start + size]).sum()), start))
    return windows


def joined(encoding: Encoding, windows: Sequence[Window], values: Sequence[np.ndarray]) -> np.ndarray:
    """Return a value for each token of a text, zero for the special tokens around it, from those of its windows.

    Of the tokens that two windows share, the first half is of the first, and the second half of the second, so that a
    token has read as much as it can on both sides. `values`: (tokens of a window, ...) each.
    """
    first, last = frame(encoding, 0)
    whole = np.zeros((len(encoding), *values[0].shape[1:]), values[0].dtype)
    end = 0
    for window, own in zip(windows, values):
        begin = (window.start + max(end, window.start)) // 2
        end = window.start + len(window) - first - (len(encoding) - last)
        whole[first + begin : first + end] = own[first + begin - window.start : first + end - window.start]
    return whole


def frame(encoding: Encoding, prompt: int) -> tuple[int, int]:
    """Return the first token after the special tokens and the first `prompt` characters, and that after the last."""
    special, ends = encoding.special_tokens_mask, [end for _, end in encoding.offsets]
    first, last = 0, len(encoding)
    while first < last and special[first]:
        first += 1
    while last > first and special[last - 1]:
        last -= 1
    while prompt and first < last and ends[first] <= prompt:
        first += 1
    return first, last


def _starts(tokens: int, size: int, overlap: int) -> list[int]:
    return list(range(0, max(1, tokens - overlap), size - overlap))
