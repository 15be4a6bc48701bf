"""Codes of a checkpoint's quantised matrices, so that they are served as they are, not rounded again.

A matrix of a graph may be a part of the checkpoint's, several of them side by side, or one transposed: its scales and
zero points are found by the values of its columns, which the rewrites of a graph leave as they are.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

LARGEST_BLOCK, SMALLEST_BLOCK = 256, 16  # inputs of a block of MatMulNBits (ONNX Runtime, ContribOperators.md)
EXPONENT_BLOCK = 32  # weights that share an exponent (OCP Microscaling Formats, version 1.0, mxfp4)
SMALLEST_EXPONENT, LARGEST_EXPONENT = -100, 127  # of a block's largest weight: its step is normal in float32


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

    @property
    def is_symmetric(self) -> bool:
        """True if each zero point is the middle one, which an operator takes where it is given none."""
        middles = pack(np.full(self.scales.shape, 2 ** (self.bits - 1), np.uint8), self.bits)
        return bool((self.zeros == middles).all())


class StoredWeights(ABC):
    """Codes of a checkpoint's matrices. `bits`: of the codes in which `precisions` serve them as they are."""

    bits: int
    precisions: tuple[str, ...]
    described: str  # the weights, as a clause for remarks

    @property
    def scattered(self) -> bool:
        """True if the inputs of a group are not side by side (GPTQ's desc_act): no block of MatMulNBits has them."""
        return False

    @abstractmethod
    def blocks(self, matrix: np.ndarray, largest: int) -> QuantizedBlocks | None:
        """Return `matrix`, (inputs, outputs), in blocks of at most `largest` inputs; None if not the checkpoint's."""


class Grids(StoredWeights):
    """Scales and zero points of each output of each matrix, by the digest of its weights."""

    def __init__(self, bits: int) -> None:
        self.bits = bits
        self.precisions = (f"int{bits}-weights",)
        self.described = f"the checkpoint's weights have {bits} bits"
        self._rows: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}
        self._scattered = 0

    @property
    def scattered(self) -> bool:
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


class SharedExponents(StoredWeights):
    """Weights of which each block of 32 inputs are small multiples of a power of two, as those of mxfp4.

    e2m1 has the values 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign: whole multiples of a half up to 12 of them, which
    have a code in 8 bits and none in 4.
    """

    bits = 8
    precisions = ("int8-weights", "int8")
    described = "the checkpoint's experts have 4 bits and an exponent for 32 of them (mxfp4)"

    def blocks(self, matrix: np.ndarray, largest: int) -> QuantizedBlocks | None:
        rows = np.ascontiguousarray(matrix.T, np.float32)
        inputs = rows.shape[1]
        if largest < EXPONENT_BLOCK or inputs % EXPONENT_BLOCK:
            return None
        values = rows.reshape(len(rows), -1, EXPONENT_BLOCK)
        largest_weights = np.abs(values).max(axis=-1)
        _, exponents = np.frexp(largest_weights)
        if not np.isfinite(largest_weights).all() or exponents.max() > LARGEST_EXPONENT:
            return None
        scales = np.ldexp(np.float32(1), np.maximum(exponents, SMALLEST_EXPONENT) - 7)  # the largest: 64 to 127 steps
        steps = values / scales[..., None]
        codes = steps.astype(np.int8)
        if (codes != steps).any():
            return None
        zeros = np.full(scales.shape, 128, np.uint8)
        return QuantizedBlocks(8, EXPONENT_BLOCK, inputs, codes.view(np.uint8) ^ 128, scales, zeros)


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
