"""Scores from logits, as the reference pipelines compute them."""

from __future__ import annotations

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    """Of logits (..., labels), floats: shares of 1 over the last axis; shifted by its maximum, so none overflows."""
    exponents = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponents / exponents.sum(axis=-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Of logits of any shape, floats: each between 0 and 1 by itself."""
    return 1.0 / (1.0 + np.exp(-logits))


def unchanged(logits: np.ndarray) -> np.ndarray:
    """The logits as they are, of any shape."""
    return logits


FUNCTIONS = {"softmax": softmax, "sigmoid": sigmoid, "none": unchanged}
