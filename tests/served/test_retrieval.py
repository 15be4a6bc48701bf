"""Answers of a real Triton against sentence-transformers, for every kind of retrieval model, however texts come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder

from builder.common.errors import ServeError
from builder.common.samples import TEXTS
from builder.serving.client.client import Client
from tests.retrievers import hybrid_outputs

UNICODE = "  日本語 😀 É – Zürich "
LONG = " ".join(TEXTS)
MIXED = (TEXTS[0], "a", UNICODE, LONG, *TEXTS[20:23])  # of unequal lengths, one of them cut
QUERY = TEXTS[3]
RANKED: dict[str, Sequence[tuple[str, Sequence[str]]]] = {
    "alone": [(QUERY, [TEXTS[3]])],
    "batched": [(QUERY, TEXTS[:4]), (UNICODE, TEXTS[4:8]), ("x", TEXTS[8:12])],
    "unicode": [(UNICODE, [UNICODE, "Ça va ?", "naïve 東京"])],
    "longest": [(QUERY, [LONG, TEXTS[3], "a"])],
    "mixed": [(QUERY, MIXED)],
}


def _bytes(values: Any) -> np.ndarray:
    return np.array([[value.encode() for value in row] for row in values], np.object_)


def _flags(rows: int) -> np.ndarray:
    return np.ones((rows, 1), np.bool_)


def _embed(client: Client, texts: Sequence[str], **options: str) -> list[dict[str, Any]]:
    """Return the answers to texts that are the rows of one request, which must be those to each alone.

    All of the latter are sent at once, so that the server batches them.
    """
    rows = {name: _bytes([[value]] * len(texts)) for name, value in options.items()}
    together = client.ask_tensors(
        {"text_input": _bytes([[text] for text in texts]), **rows, "truncate": _flags(len(texts))}
    )
    with ThreadPoolExecutor(len(texts)) as pool:
        alone = pool.map(client.ask, [{"text_input": text, "truncate": True, **options} for text in texts])
    for one, row in zip(alone, together, strict=True):
        for name, value in one.items():
            padded = row[name][: len(value)] if isinstance(value, list) else row[name]
            np.testing.assert_allclose(padded, value, atol=1e-5)
    return together


@pytest.mark.parametrize("kind", RANKED)
def test_served_decoder_ranks_like_the_cross_encoder(
    kind: str, client: Callable[[str], Client], checkpoint: Callable[[str], Path]
) -> None:
    queries, documents = zip(*RANKED[kind], strict=True)
    tensors = {"query": _bytes([[query] for query in queries]), "documents": _bytes(documents)}
    ranked = client("judges").ask_tensors({**tensors, "truncate": _flags(len(queries))})
    library = CrossEncoder(str(checkpoint("judges")), device="cpu")
    for query, texts, answer in zip(queries, documents, ranked, strict=True):
        scores = library.predict([(query, text) for text in texts], show_progress_bar=False)
        np.testing.assert_allclose(answer["score"], scores, rtol=1e-4)
        assert answer["order"] == [one["corpus_id"] for one in library.rank(query, list(texts))]
        assert answer["truncated"] is (LONG in texts)


def test_served_decoder_reads_an_instruction(
    client: Callable[[str], Client], checkpoint: Callable[[str], Path]
) -> None:
    served, sample = client("judges"), {"query": QUERY, "documents": list(TEXTS[:4])}
    library = CrossEncoder(str(checkpoint("judges")), device="cpu")
    pairs = [(QUERY, text) for text in TEXTS[:4]]
    plain = served.ask(sample)["score"]
    for option, prompt in (
        ({"prompt_name": "web"}, "Find web pages"),
        ({"instruction": "Find recipes"}, "Find recipes"),
    ):
        scores = served.ask({**sample, **option})["score"]
        np.testing.assert_allclose(scores, library.predict(pairs, prompt=prompt), rtol=1e-4)
        assert scores != plain


def test_served_late_interaction_ranks_like_the_library(
    client: Callable[[str], Client], checkpoint: Callable[[str], Path]
) -> None:
    served, library = client("late"), MultiVectorEncoder(str(checkpoint("late")), device="cpu")
    for kind, encode in (("query", library.encode_query), ("document", library.encode_document)):
        expected = encode(list(MIXED), convert_to_numpy=True, show_progress_bar=False)
        for answer, vectors in zip(_embed(served, MIXED, input_type=kind), expected, strict=True):
            assert answer["vector_count"] == len(vectors)
            np.testing.assert_allclose(answer["vectors"][: len(vectors)], vectors, atol=1e-5)
    answer = served.ask({"query": QUERY, "documents": list(MIXED), "truncate": True})
    scores = library.similarity(library.encode_query([QUERY]), library.encode_document(list(MIXED)))[0]
    np.testing.assert_allclose(answer["score"], scores, rtol=1e-4)
    assert answer["order"] == np.argsort(-scores.numpy(), kind="stable").tolist()


def test_served_hybrid_embeddings_equal_their_definition(
    client: Callable[[str], Client], checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint("hybrid")
    dense = SentenceTransformer(str(folder), device="cpu").encode(list(MIXED))
    for text, expected, answer in zip(MIXED, dense, _embed(client("hybrid"), MIXED), strict=True):
        _, weights, vectors = hybrid_outputs(folder, text, 512)
        np.testing.assert_allclose(answer["embedding"], expected, atol=1e-5)
        indices = np.array(answer["indices"])
        assert indices[indices >= 0].tolist() == np.flatnonzero(weights).tolist()
        np.testing.assert_allclose(np.array(answer["values"])[indices >= 0], weights[weights > 0], atol=1e-5)
        assert answer["vector_count"] == len(vectors)
        np.testing.assert_allclose(answer["vectors"][: len(vectors)], vectors, atol=1e-5)


def test_served_router_searches_like_the_sparse_encoder(
    client: Callable[[str], Client], checkpoint: Callable[[str], Path]
) -> None:
    served, library = client("searches"), SparseEncoder(str(checkpoint("searches")), device="cpu")
    found, right = [], []
    for kind, encode in (("query", library.encode_query), ("document", library.encode_document)):
        expected = encode(list(MIXED), convert_to_sparse_tensor=False).numpy()
        weights = np.zeros_like(expected)
        for row, answer in zip(weights, _embed(served, MIXED, input_type=kind), strict=True):
            used = np.array(answer["indices"]) >= 0
            row[np.array(answer["indices"])[used]] = np.array(answer["values"])[used]
        np.testing.assert_allclose(weights, expected, atol=1e-5)
        found.append(weights)
        right.append(expected)
    orders = [  # tokens of documents alone score nothing
        np.argsort(-(queries @ documents[:, : queries.shape[1]].T), axis=1, kind="stable").tolist()
        for queries, documents in (found, right)
    ]
    assert orders[0] == orders[1]


@pytest.mark.parametrize("name", ["judges", "late", "embeds", "hybrid", "searches"])
def test_retrieval_model_refuses_empty_texts_and_answers_the_next(name: str, client: Callable[[str], Client]) -> None:
    served = client(name)
    ranks = name == "judges"
    for blank in ("", " \n"):
        with pytest.raises(ServeError, match="is empty"):
            served.ask({"query": "a", "documents": ["b", blank]} if ranks else {"text_input": blank})
    assert served.ask({"query": "a", "documents": ["b"]} if ranks else {"text_input": "b"})["truncated"] is False
