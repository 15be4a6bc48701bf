"""Cohere's own client."""

from __future__ import annotations

import cohere
from checking import WORK, check, report


@check("rerank")
def _() -> None:
    api = cohere.ClientV2("none", base_url=WORK["gateway"])
    answer = api.rerank(model="ranks", query="passport", documents=["The town hall", "The soup"], top_n=1)
    assert len(answer.results) == 1


@check("embeddings, of several types")
def _() -> None:
    options = {"model": "embeds", "texts": ["The town hall", "The soup"], "input_type": "search_document"}
    first = cohere.Client("none", base_url=WORK["gateway"]).embed(**options)
    assert len(first.embeddings) == 2
    second = cohere.ClientV2("none", base_url=WORK["gateway"]).embed(**options, embedding_types=["float", "int8"])
    assert len(second.embeddings.float_) == len(second.embeddings.int8) == 2


report()
