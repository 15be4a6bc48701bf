"""sentence-transformers' own evaluators on a model behind the gateway."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from sentence_transformers.sentence_transformer import evaluation

from tests.serving.gateway.remote_encoder import RemoteEncoder
from tests.serving.gateway.serving import served

TEXTS = ["x" * (1 + at * at) for at in range(10)]


class LocalEncoder(RemoteEncoder):
    """Computes what the stand-in for Triton answers: the length of a text, in a vector."""

    def _embed(self, texts: list[str], size: int | None) -> np.ndarray:
        vectors = np.array([[len(text), 3, 0, 1] for text in texts], np.float32)[:, :size]
        return vectors if size is None else vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


EVALUATORS = {
    "similarity": lambda: evaluation.EmbeddingSimilarityEvaluator(TEXTS, TEXTS[::-1], np.linspace(0, 1, 10).tolist()),
    "retrieval": lambda: evaluation.InformationRetrievalEvaluator(
        {"q1": "xx", "q2": "x" * 50}, dict(enumerate(TEXTS)), {"q1": {0, 1}, "q2": {7}}
    ),
    "triplets": lambda: evaluation.TripletEvaluator(TEXTS[:3], TEXTS[1:4], TEXTS[5:8]),
    "reranking": lambda: evaluation.RerankingEvaluator([{"query": "xx", "positive": TEXTS[:2], "negative": TEXTS[5:]}]),
}


@pytest.mark.parametrize("name", EVALUATORS)
def test_evaluators_of_sentence_transformers_read_a_served_model(name: str) -> None:
    with served() as url:
        remote: Any = EVALUATORS[name]()(cast(Any, RemoteEncoder(url, "embeds")))
    local: Any = EVALUATORS[name]()(cast(Any, LocalEncoder("", "")))
    assert remote == pytest.approx(local)
    assert remote
