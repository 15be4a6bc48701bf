"""Compute scores from logits, as the reference pipelines do."""

from __future__ import annotations

import numpy as np

CLASS_SCORES = "class_scores"  # an output of classifiers, and the parameter that asks for it


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the softmax of float logits (..., labels) over the last axis; shifted by the maximum against overflow."""
    exponents = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponents / exponents.sum(axis=-1, keepdims=True)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the logarithm of the softmax of float logits (..., labels) over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logarithms: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logarithms


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """Return the sigmoid of float logits of any shape: each between 0 and 1 independently."""
    return 1.0 / (1.0 + np.exp(-logits))


def unchanged(logits: np.ndarray) -> np.ndarray:
    return logits


FUNCTIONS = {"softmax": softmax, "sigmoid": sigmoid, "none": unchanged}
