"""Rank documents for queries: compare embeddings of both, or read each document together with the query.

Knows samples and answers of a task by their keys; a task says which ranker is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

QUERY_PROMPTS = ("query",)  # names of prompts: encode_query and encode_document, sentence_transformer/model.py, 6.2
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
QUERIES_AT_ONCE = 64  # whose similarities to all documents are in memory together
DOCUMENTS_AT_ONCE = 32  # of one request

Sample = Mapping[str, Any]
Answer = Mapping[str, Any]


@dataclass(frozen=True)
class Ranking:
    """Documents to rank for each query; `candidates` are their places in `documents`, by query."""

    queries: Sequence[str]
    documents: Sequence[str]
    candidates: Sequence[Sequence[int]]


class Ranker(Protocol):
    """Way of a task to rank. `is_search`: it ranks all documents at the cost of one answer each."""

    @property
    def is_search(self) -> bool: ...

    def samples(self, ranking: Ranking) -> list[Sample]:
        """Return the samples whose answers rank the documents."""

    def scores(self, ranking: Ranking, answers: Sequence[Answer]) -> Iterator[np.ndarray]:
        """Yield the score of each candidate of each query, float (candidates,)."""


@dataclass(frozen=True)
class EmbeddingRanker:
    """Ranker by embeddings.

    `query` and `document`: inputs of a sample beside its text. `vectors`: return embeddings (answers, ...) of answers.
    `similarity`: return the similarities (queries, documents) of two results of `vectors`.
    """

    query: Sample
    document: Sample
    vectors: Callable[[Sequence[Answer]], Any]
    similarity: Callable[[Any, Any], torch.Tensor]
    is_search = True

    def samples(self, ranking: Ranking) -> list[Sample]:
        queries = [{"text_input": text, **self.query} for text in ranking.queries]
        return [*queries, *({"text_input": text, **self.document} for text in ranking.documents)]

    def scores(self, ranking: Ranking, answers: Sequence[Answer]) -> Iterator[np.ndarray]:
        documents = self.vectors(answers[len(ranking.queries) :])
        for start in range(0, len(ranking.queries), QUERIES_AT_ONCE):
            queries = self.vectors(answers[start : min(start + QUERIES_AT_ONCE, len(ranking.queries))])
            similarities = self.similarity(queries, documents).numpy()
            for row, candidates in zip(similarities, ranking.candidates[start:], strict=False):
                yield row[np.asarray(candidates, int)]


def token_vectors(answers: Sequence[Answer]) -> list[torch.Tensor]:
    """Return the vectors of the tokens of each answer, float32 (vectors, size), without those that pad a batch."""
    return [
        torch.from_numpy(np.asarray(answer["vectors"], np.float32)[: int(answer["vector_count"])]) for answer in answers
    ]


@dataclass(frozen=True)
class PairRanker:
    """Ranker by a model that reads the query and a document together."""

    is_search = False

    def samples(self, ranking: Ranking) -> list[Sample]:
        return [
            {"query": query, "documents": [ranking.documents[place] for place in places]}
            for query, candidates in zip(ranking.queries, ranking.candidates, strict=True)
            for places in _chunks(candidates)
        ]

    def scores(self, ranking: Ranking, answers: Sequence[Answer]) -> Iterator[np.ndarray]:
        remaining = iter(answers)
        for candidates in ranking.candidates:
            yield np.concatenate([np.asarray(next(remaining)["score"], float) for _ in _chunks(candidates)])


def _chunks(places: Sequence[int]) -> list[Sequence[int]]:
    return [places[start : start + DOCUMENTS_AT_ONCE] for start in range(0, len(places), DOCUMENTS_AT_ONCE)]


def embedding_ranker(
    prompts: Mapping[str, str], similarity: str, vectors: Callable[[Sequence[Answer]], Any]
) -> EmbeddingRanker:
    """Return the ranker of a checkpoint with `prompts` by name, and a similarity by sentence-transformers' name."""
    from sentence_transformers.util import SimilarityFunction  # slow, and not needed to build

    query, document = (_named(prompts, names) for names in (QUERY_PROMPTS, DOCUMENT_PROMPTS))
    return EmbeddingRanker(query, document, vectors, SimilarityFunction.to_similarity_fn(similarity))


def _named(prompts: Mapping[str, str], names: Sequence[str]) -> Sample:
    name = next((name for name in names if name in prompts), None)
    return {} if name is None else {"prompt_name": name}
