"""Merge the vectors of similar tokens of a document, so that an index has fewer of them.

Computes what HierarchicalTokenPooling of sentence-transformers does (multi_vector_encoder/modules/token_pooling.py,
6.2) with scipy's Ward linkage (cluster/_hierarchy.pyx, 1.17: nearest-neighbour chains, arXiv:1109.2378), in numpy.
"""

from __future__ import annotations

import numpy as np

Merge = tuple[int, int, float]  # two clusters and their distance


def pool(vectors: np.ndarray, factor: float) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the means of about len(vectors) / factor groups of `vectors` (n, size), and the members of each group.

    The first vector stays as it is.
    """
    first, rest = vectors[:1], vectors[1:]
    groups = [np.arange(len(first))] if len(first) else []
    groups += [members + 1 for members in _groups(rest, max(int(len(rest) // factor), 1))]
    return np.stack([vectors[members].mean(axis=0) for members in groups]), groups


def _groups(vectors: np.ndarray, count: int) -> list[np.ndarray]:
    """Return the members of `count` clusters by cosine distance; fewer if merges at the limit are equally far."""
    if count >= len(vectors):
        return [np.array([index]) for index in range(len(vectors))]
    merges = _linkage(np.clip(1 - vectors @ vectors.T, 0, 2).astype(np.float64))
    limit = merges[len(vectors) - count - 1][2]
    return _leaves(merges, len(vectors), limit)


def _linkage(distances: np.ndarray) -> list[Merge]:
    """Return all merges by Ward's criterion, nearest first; `distances` (n, n) is overwritten.

    Merge k makes the cluster n + k; of its two clusters the one with the lower number comes first.
    """
    count = len(distances)
    np.fill_diagonal(distances, np.inf)
    sizes = np.ones(count)
    chain: list[int] = []
    merges: list[Merge] = []
    for _ in range(count - 1):
        chain = chain or [int(np.flatnonzero(sizes)[0])]
        low, high = sorted(_nearest_pair(distances, chain))
        merges.append((low, high, float(distances[low, high])))
        _join(distances, sizes, low, high)
    return _numbered(sorted(merges, key=lambda merge: merge[2]), count)


def _nearest_pair(distances: np.ndarray, chain: list[int]) -> tuple[int, int]:
    """Follow nearest neighbours from the end of `chain` to two that are each other's; remove both from it."""
    while True:
        last = chain[-1]
        nearest = int(distances[last].argmin())
        if len(chain) > 1 and distances[last, nearest] >= distances[last, chain[-2]]:
            return chain.pop(), chain.pop()
        chain.append(nearest)


def _join(distances: np.ndarray, sizes: np.ndarray, low: int, high: int) -> None:
    """Let `high` stand for both clusters, with distances by the formula of Lance and Williams."""
    a, b, between = sizes[low], sizes[high], distances[low, high]
    sizes[low], sizes[high] = 0, a + b
    others = np.flatnonzero(sizes)
    others = others[others != high]
    c = sizes[others]
    to_low, to_high = distances[others, low], distances[others, high]
    squares = ((a + c) * to_low**2 + (b + c) * to_high**2 - c * between**2) / (a + b + c)
    distances[others, high] = distances[high, others] = np.sqrt(squares)
    distances[low], distances[:, low] = np.inf, np.inf


def _numbered(merges: list[Merge], count: int) -> list[Merge]:
    """Name the clusters of sorted merges by number: those of single vectors 0 to count - 1, then one a merge."""
    parents, numbered = list(range(2 * count)), []

    def root(cluster: int) -> int:
        while parents[cluster] != cluster:
            cluster = parents[cluster]
        return cluster

    for number, (low, high, distance) in enumerate(merges, count):
        first, second = sorted((root(low), root(high)))
        parents[first] = parents[second] = number
        numbered.append((first, second, distance))
    return numbered


def _leaves(merges: list[Merge], count: int, limit: float) -> list[np.ndarray]:
    """Return the members of each cluster whose merges are no further than `limit`, in the order of scipy's fcluster.

    Of two merged clusters, the single vectors come last.
    """
    groups: list[list[int]] = []
    waiting = [(count + len(merges) - 1, False)]
    while waiting:
        cluster, inside = waiting.pop()
        low, high, distance = merges[cluster - count] if cluster >= count else (-1, -1, 0.0)
        if not inside and (cluster < count or distance <= limit):
            groups.append([])
            inside = True
        if cluster < count:
            groups[-1].append(cluster)
        else:
            children = sorted((low, high), key=lambda child: child < count)
            waiting += [(child, inside) for child in reversed(children)]
    return [np.array(sorted(members)) for members in groups]
