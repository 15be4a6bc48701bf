"""Data for tasks that rank: pairs of texts with scores, queries with their documents, and retrieval folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from builder.checkpoints.labelled.evaluation import LabelledData, Row, ranking_data, text_of, texts_of, without
from builder.checkpoints.metrics import (
    RANKING_MEASURES,
    RETRIEVAL_MEASURES,
    SIMILARITY_MEASURES,
    TOP,
    score_ranking,
    score_retrieval,
    score_similarity,
)
from builder.checkpoints.rankers import EmbeddingRanker, Ranker, Ranking
from builder.common.data_folders import CANDIDATES, CORPUS, INSTRUCTIONS, QRELS, QUERIES
from builder.common.errors import SpecError

NEGATIVES = "negative"  # prefix of the keys of texts that are not relevant: negative, negatives, negative_1, ...
RERANKED = 100  # candidates of a query that are reranked, as sentence-transformers' NanoBEIR evaluator does


def pairs(ranker: Ranker, rows: Sequence[Row], keys: Sequence[str]) -> LabelledData:
    """Return the data of pairs of texts with a number of how alike they are."""
    first, second, score = keys
    texts = [(text_of(row, first), text_of(row, second), row[score]) for row in rows]
    whole = [(a, b, float(value)) for a, b, value in texts if a.strip() and b.strip() and value is not None]
    if len(whole) < 2:
        raise SpecError("fewer than two pairs have texts and a score: Spearman needs more")
    documents = list(dict.fromkeys(text for _, text, _ in whole))
    places = {text: place for place, text in enumerate(documents)}
    if isinstance(ranker, EmbeddingRanker):  # neither text is a query
        ranker = EmbeddingRanker({}, {}, ranker.vectors, ranker.similarity)
    return ranking_data(
        "pairs with scores",
        f"{len(whole)} pairs",
        ranker,
        Ranking([text for text, _, _ in whole], documents, [[places[text]] for _, text, _ in whole]),
        [value for _, _, value in whole],
        lambda values, scores: score_similarity(values, [score for (score,) in scores]),
        SIMILARITY_MEASURES,
        without(len(rows) - len(whole), "pairs without a text or a score"),
    )


def triplets(ranker: Ranker, rows: Sequence[Row], keys: Sequence[str]) -> LabelledData:
    """Return the data of queries with relevant documents and others.

    Documents that are relevant too are not repeated among the others, as in sentence-transformers' evaluators.
    """
    query, positive = keys
    lists = []
    for row in rows:
        right = texts_of(row[positive], positive)
        others = [text for key in row if _is_other(key) for text in texts_of(row[key], key)]
        documents = list(dict.fromkeys([*right, *others]))
        if text_of(row, query).strip() and right and len(documents) > 1:
            lists.append((str(row[query]), documents, [float(text in right) for text in documents]))
    return _ranked("queries with positives and negatives", ranker, lists, len(rows) - len(lists))


def graded(ranker: Ranker, rows: Sequence[Row], keys: Sequence[str]) -> LabelledData:
    """Return the data of queries with documents and the relevance of each."""
    query, documents, relevance = keys
    lists = []
    for row in rows:
        if len(row[documents]) != len(row[relevance]):
            raise SpecError(f"{len(row[documents])} {documents} have {len(row[relevance])} numbers of {relevance}")
        given = [
            (text, float(grade)) for text, grade in zip(row[documents], row[relevance], strict=True) if text.strip()
        ]
        if text_of(row, query).strip() and len(given) > 1:
            lists.append((str(row[query]), [text for text, _ in given], [grade for _, grade in given]))
    return _ranked("queries with the relevance of documents", ranker, lists, len(rows) - len(lists))


def _is_other(key: str) -> bool:
    return key == "documents" or key.startswith(NEGATIVES)


def _ranked(
    kind: str, ranker: Ranker, lists: Sequence[tuple[str, list[str], list[float]]], left_out: int
) -> LabelledData:
    if not lists:
        raise SpecError(f"no row of {kind} has a query, a relevant document and another one")
    texts = list(dict.fromkeys(text for _, documents, _ in lists for text in documents))
    places = {text: place for place, text in enumerate(texts)}
    candidates = [[places[text] for text in documents] for _, documents, _ in lists]
    relevance = [grades for _, _, grades in lists]
    return ranking_data(
        kind,
        f"{len(lists)} queries",
        ranker,
        Ranking([query for query, _, _ in lists], texts, candidates),
        relevance,
        score_ranking,
        RANKING_MEASURES,
        without(left_out, "queries without a relevant document and another one"),
    )


def retrieval(ranker: Ranker, parts: Mapping[str, Sequence[Row]], limit: int | None) -> LabelledData:
    """Return the data of a corpus with queries and the relevance of documents, for the first `limit` queries.

    Embeddings are searched exactly. Another ranker gets the relevant documents and the first 100 candidates of each
    query, as in sentence-transformers' CrossEncoderNanoBEIREvaluator (cross_encoder/evaluation/nano_beir.py, 6.2).
    """
    if not parts.get(QRELS):
        raise SpecError("the folder has a corpus and queries, but no relevance of documents: expected qrels or data")
    corpus = {_id(row): _title_and_text(row) for row in parts[CORPUS]}
    corpus = {name: text for name, text in corpus.items() if text}
    relevance: dict[str, dict[str, float]] = {}
    for row in parts[QRELS]:
        grade = float(row.get("score", 1))
        if grade > 0:
            found = row["corpus-id"] if isinstance(row["corpus-id"], list) else [row["corpus-id"]]
            relevance.setdefault(str(row["query-id"]), {}).update(dict.fromkeys(map(str, found), grade))
    instructions = {str(row["query-id"]): row["instruction"] for row in parts.get(INSTRUCTIONS, ())}
    queries = {_id(row): _text_and_instruction(row, instructions) for row in parts[QUERIES]}
    names = [name for name, text in queries.items() if text and name in relevance][:limit]
    if not names or not corpus:
        raise SpecError("no query of the folder has a text and a relevant document: are the ids of one data set?")
    note = without(len(parts[CORPUS]) - len(corpus), "documents without a text")
    texts = {name: queries[name] for name in names}
    if ranker.is_search:
        return _search(ranker, texts, corpus, relevance, note)
    return _rerank(ranker, texts, corpus, relevance, parts.get(CANDIDATES, ()), note)


def _text_and_instruction(row: Row, instructions: Mapping[str, str]) -> str:
    """Return the text of a query with its instruction, of its own row or another's, joined as mteb joins them.

    Source: _create_dataloaders.py and abstasks/retrieval_dataset_loaders.py, mteb 2.
    """
    parts = (row["text"], instructions.get(_id(row), row.get("instruction")))
    return " ".join(str(part) for part in parts if part).strip()


def _search(
    ranker: Ranker,
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    relevance: Mapping[str, Mapping[str, float]],
    note: str,
) -> LabelledData:
    ids = np.array(list(corpus))
    everything = range(len(corpus))
    return ranking_data(
        "retrieval",
        f"{len(queries)} queries, {len(corpus)} documents",
        ranker,
        Ranking(list(queries.values()), list(corpus.values()), [everything] * len(queries)),
        [relevance[name] for name in queries],
        score_retrieval,
        RETRIEVAL_MEASURES,
        note,
        lambda scores: _best(ids, scores),
    )


def _best(ids: np.ndarray, scores: np.ndarray) -> list[str]:
    """Return the ids with the highest scores; of equal ones, the first by id."""
    least = np.sort(scores)[-TOP:][0]
    reached = np.flatnonzero(scores >= least)
    return [str(name) for name in ids[reached[np.lexsort((ids[reached], -scores[reached]))]][:TOP]]


def _rerank(
    ranker: Ranker,
    queries: Mapping[str, str],
    corpus: Mapping[str, str],
    relevance: Mapping[str, Mapping[str, float]],
    candidates: Sequence[Row],
    note: str,
) -> LabelledData:
    listed = {str(row["query-id"]): [str(name) for name in row["corpus-ids"]] for row in candidates}
    if not listed.keys() & queries.keys():
        raise SpecError(
            "a reranker orders the candidates of another search, and the folder has none: expected top_ranked or bm25 "
            "with query-id and corpus-ids"
        )
    places = {name: place for place, name in enumerate(corpus)}
    kept = {name: text for name, text in queries.items() if name in listed}
    lists = [list(dict.fromkeys([*relevance[name], *listed[name][:RERANKED]])) for name in kept]
    lists = [[name for name in names if name in places] for names in lists]
    grades = [[relevance[query].get(name, 0.0) for name in names] for query, names in zip(kept, lists, strict=True)]
    return ranking_data(
        "retrieval, candidates reranked",
        f"{len(kept)} queries",
        ranker,
        Ranking(list(kept.values()), list(corpus.values()), [[places[name] for name in names] for names in lists]),
        grades,
        score_ranking,
        RANKING_MEASURES,
        note,
    )


def _id(row: Row) -> str:
    """Return the id of a query or document. Raises SpecError if it has none."""
    name: Any = row.get("_id", row.get("id"))
    if name is None:
        raise SpecError(f"a row of the corpus or the queries has no _id; it has {', '.join(row)}")
    return str(name)


def _title_and_text(row: Row) -> str:
    """Return a document as BEIR, mteb and sentence-transformers read it: its title, if it has one, and its text."""
    return f"{row.get('title') or ''} {row.get('text') or ''}".strip()
