"""Encode vectors in fewer bits, as sentence-transformers' quantize_embeddings does (util/quantization.py, 6.2).

Its int8 and uint8 need ranges. One range serves all numbers here: vectors of length 1 times 127, rounded, so that no
calibration is needed, 0 stays 0 in int8, and products of vectors of different requests compare.
"""

from __future__ import annotations

import base64
from typing import Any, Literal, get_args

import numpy as np

from builder.serving.gateway.errors import bad_field

Precision = Literal["int8", "uint8", "binary", "ubinary"]
Encoding = Literal["float", "base64", "float16", "int8", "uint8", "binary", "ubinary"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
RANGE = np.array([-128.5 / 127, 126.5 / 127], np.float32)  # rounds where quantize_embeddings rounds down
STEP = (RANGE[1] - RANGE[0]) / 255


def quantize(vector: np.ndarray, precision: str) -> np.ndarray:
    """Return the last axis of `vector` in `precision`; bits are packed, eight to a byte, the first in the highest.

    int8 and uint8 are those of the vector at length 1, with `RANGE` for each number.
    """
    if precision in ("binary", "ubinary"):
        packed = np.packbits(vector > 0, axis=-1)
        return packed if precision == "ubinary" else (packed - 128).astype(np.int8)
    unit = vector / np.maximum(np.linalg.norm(vector, axis=-1, keepdims=True), np.float32(1e-12))
    levels = np.clip(np.floor((unit - RANGE[0]) / STEP), 0, 255)
    return levels.astype(np.uint8) if precision == "uint8" else (levels - 128).astype(np.int8)


def encode(vector: np.ndarray, encoding: str) -> Any:
    """Return the vector as numbers of a precision, or in base64 of little-endian floats: 32 bits, or float16.

    Raises ApiError for a number that float16 does not have.
    """
    if encoding == "base64":
        return to_base64(np.asarray(vector, "<f4"))
    if encoding == "float16":
        with np.errstate(over="ignore"):
            halves = np.asarray(vector, "<f2")
        if not np.isfinite(halves).all():
            raise bad_field("encoding_format", "float16 ends at 65504, and a number is larger; ask for base64")
        return to_base64(halves)
    return quantize(vector, encoding) if encoding in PRECISIONS else vector


def to_base64(numbers: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(numbers).tobytes()).decode()
