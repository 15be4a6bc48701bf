"""Embedding and rerank functions of pymilvus.model that take an address."""

from __future__ import annotations

import os

from checking import WORK, check, report
from pymilvus.model.dense import CohereEmbeddingFunction, OpenAIEmbeddingFunction
from pymilvus.model.dense.tei import TEIEmbeddingFunction
from pymilvus.model.reranker import CohereRerankFunction

TEXTS = ["The town hall", "The soup"]


def embeds(function: OpenAIEmbeddingFunction | TEIEmbeddingFunction | CohereEmbeddingFunction) -> None:
    assert len(function.encode_queries(TEXTS)) == len(function.encode_documents(TEXTS)) == len(TEXTS)


@check("OpenAIEmbeddingFunction")
def _() -> None:
    embeds(OpenAIEmbeddingFunction("embeds", api_key="none", base_url=f"{WORK['gateway']}/v1"))


@check("TEIEmbeddingFunction")
def _() -> None:
    embeds(TEIEmbeddingFunction(WORK["gateway"]))


@check("CohereEmbeddingFunction")
def _() -> None:
    embeds(CohereEmbeddingFunction("embeds", api_key="none", base_url=WORK["gateway"]))


@check("CohereRerankFunction, by CO_API_URL")
def _() -> None:
    os.environ["CO_API_URL"] = WORK["gateway"]
    (best,) = CohereRerankFunction("ranks", api_key="none")("passport", TEXTS, top_k=1)
    assert best.text in TEXTS


report()
