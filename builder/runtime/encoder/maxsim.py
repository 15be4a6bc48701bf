"""Score documents for a query by late interaction: MaxSim, of arXiv:2004.12832, over all documents at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NO_VECTORS = -1e9  # score of a document without vectors, as in sentence-transformers' util/similarity.py, 6.2


def score(query: np.ndarray, documents: Sequence[np.ndarray], mean: bool = False) -> np.ndarray:
    """Return a score a document, (documents,), from the vectors of a query and of each document, (vectors, size) each.

    The score is the sum, over the query's vectors, of the largest product with a vector of the document; `mean`: their
    mean instead.
    """
    counts = np.array([len(vectors) for vectors in documents])
    scores = np.full(len(documents), NO_VECTORS, np.float32)
    found = np.flatnonzero(counts)
    if len(found):
        products = query @ np.concatenate([documents[index] for index in found]).T
        starts = np.cumsum(counts[found]) - counts[found]
        scores[found] = np.maximum.reduceat(products, starts, axis=1).sum(axis=0, dtype=np.float32)
    return scores / max(1, len(query)) if mean else scores
