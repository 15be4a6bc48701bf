"""Serve POST /v1/rerank, /v2/rerank and /rerank, as Cohere's and Jina's clients send them.

They rank documents by their relevance to a query. A body with `texts` is TEI's, and answered in TEI's shape: tei.py.
Sources: https://docs.cohere.com/reference/rerank, https://jina.ai/reranker, and TEI's OpenAPI document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.rows import infer_rows
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.validation import StrictBody

MAX_DOCUMENTS = 10_000
AT_ONCE = 64  # documents per request to the model, so that other requests get a turn


class RerankRequest(StrictBody):
    model: str | None = None
    query: str
    documents: Annotated[list[str | dict[str, Any]], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = False
    truncate: bool | None = None


async def rerank(context: RequestContext) -> dict[str, Any]:
    """Rank the documents, the most relevant first. Scores are the model's own: 0 to 1 if it ends in a sigmoid."""
    body: RerankRequest = context.body
    model = await context.model_for("for text-ranking", is_reranker, body.model)
    texts = [_text(number, document) for number, document in enumerate(body.documents)]
    options = {} if body.truncate is None else {"truncate": body.truncate}
    scored = rank_scores(await relevance_scores(context, model, body.query, texts, options))
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": s} for i, s in scored[: body.top_n]]
    if body.return_documents:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    used = context.record.prompt_tokens
    return {
        "id": context.record.id,
        "model": model.name,
        "results": results,
        "usage": {"prompt_tokens": used, "total_tokens": used},
        "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
    }


def is_reranker(model: ServedModel) -> bool:
    """Return True if a model scores documents for a query."""
    return {"query", "documents"} <= set(model.inputs) and "score" in model.outputs


async def relevance_scores(
    context: RequestContext, model: ServedModel, query: str, texts: Sequence[str], options: Mapping[str, Any]
) -> list[float]:
    """Return the score of each text, in their order."""
    parts = [texts[at : at + AT_ONCE] for at in range(0, len(texts), AT_ONCE)]
    rows = await infer_rows(context, model, [{"query": [query], "documents": part} for part in parts], options)
    return [float(value) for row in rows for value in row["score"]]


def rank_scores(scores: Sequence[float]) -> list[tuple[int, float]]:
    """Return (number, score) of each text, the best first."""
    return sorted(enumerate(scores), key=lambda pair: -pair[1])


def _text(number: int, document: str | dict[str, Any]) -> str:
    if isinstance(document, str):
        return document
    text = document.get("text")
    if not isinstance(text, str) or len(document) > 1:
        raise bad_field("documents", f'documents[{number}] is neither text nor {{"text": "..."}}')
    return text
