"""Scores from logits, as the reference pipelines compute them."""

from __future__ import annotations

import numpy as np


def softmax(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, shifted by its maximum."""
    exponents = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponents / exponents.sum(axis=-1, keepdims=True)


def sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-logits))


def unchanged(logits: np.ndarray) -> np.ndarray:
    return logits


FUNCTIONS = {"softmax": softmax, "sigmoid": sigmoid, "none": unchanged}
