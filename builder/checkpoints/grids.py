"""Scales and zero points of a checkpoint's quantised matrices, so that they are served as they are, not rounded again.

A matrix of a graph may be a part of the checkpoint's, several of them side by side, or one transposed: it is found by
the values of its columns, which the rewrites of a graph leave as they are.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

LARGEST_BLOCK, SMALLEST_BLOCK = 256, 16  # inputs of a block of MatMulNBits (ONNX Runtime, ContribOperators.md)


@dataclass(frozen=True)
class QuantizedBlocks:
    """Matrix of `inputs` by outputs in blocks of `size` inputs, as MatMulNBits takes it (ContribOperators.md).

    `codes`: (outputs, blocks, size * bits / 8), `scales`: (outputs, blocks), `zeros`: (outputs, blocks * bits / 8,
    rounded up); uint8, float32, uint8, the low bits first.
    """

    bits: int
    size: int
    inputs: int
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray


@dataclass
class Grids:
    """Scales and zero points of each output of each matrix, by the digest of its weights."""

    bits: int
    _rows: dict[bytes, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    _scattered: int = 0

    def __bool__(self) -> bool:
        return bool(self._rows or self._scattered)

    @property
    def scattered(self) -> bool:
        """True if the inputs of a group are not side by side (GPTQ's desc_act): no block of MatMulNBits has them."""
        return self._scattered > 0

    def add(self, weights: np.ndarray, scales: np.ndarray, zeros: np.ndarray, groups: np.ndarray) -> None:
        """Add a matrix to the grids.

        `weights`: (outputs, inputs); `scales`, `zeros`: (outputs, groups); `groups`: the group of each input.
        """
        size = -(-len(groups) // scales.shape[1])
        if (groups != np.arange(len(groups)) // size).any():
            self._scattered += 1
            return
        for row, scale, zero in zip(np.ascontiguousarray(weights), scales, zeros, strict=True):
            self._rows[_digest(row)] = (scale, zero)

    def blocks(self, matrix: np.ndarray, largest: int) -> QuantizedBlocks | None:
        """Return `matrix`, (inputs, outputs), in blocks of at most `largest` inputs; None if not the checkpoint's."""
        rows = np.ascontiguousarray(matrix.T, np.float32)
        blocks = [self._rows.get(_digest(row)) for row in rows]
        known = [one for one in blocks if one is not None]
        inputs = rows.shape[1]
        if len(known) < len(blocks) or len({len(scale) for scale, _ in known}) != 1:
            return None
        group = -(-inputs // len(known[0][0]))
        size = _block(group, inputs, largest)
        if size is None:
            return None
        repeats = np.minimum(np.arange(0, inputs, size) // group, len(known[0][0]) - 1)
        scales = np.stack([scale for scale, _ in known])[:, repeats]
        zeros = np.stack([zero for _, zero in known])[:, repeats]
        padded = np.pad(rows, ((0, 0), (0, scales.shape[1] * size - inputs)))
        steps = np.where(scales == 0, 1, scales)[..., None]
        codes = np.rint(padded.reshape(len(rows), -1, size) / steps) + zeros[..., None]
        if codes.min() < 0 or codes.max() >= 2**self.bits or zeros.max() >= 2**self.bits:
            return None
        packed = pack(codes.astype(np.uint8), self.bits)
        return QuantizedBlocks(self.bits, size, inputs, packed, scales.astype(np.float32), pack(zeros, self.bits))


def _block(group: int, inputs: int, size: int) -> int | None:
    """Return the largest block that no group ends in: a power of two, `size` at most, that divides the group.

    For a group of all inputs it may be any.
    """
    while size >= SMALLEST_BLOCK:
        if group % size == 0 or group >= inputs:
            return size
        size //= 2
    return None


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack along the last axis, two of 4 bits in a byte, the first in the low half."""
    if bits == 8:
        return np.ascontiguousarray(values)
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros((*values.shape[:-1], 1), np.uint8)], axis=-1)
    return np.ascontiguousarray(values[..., 0::2] | values[..., 1::2] << 4)


def _digest(row: np.ndarray) -> bytes:
    return hashlib.blake2b(row.tobytes(), digest_size=16).digest()
