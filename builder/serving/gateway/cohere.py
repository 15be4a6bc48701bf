"""Serve POST /v1/embed and /v2/embed for Cohere's clients, and /v1/rerank, /v2/rerank and /rerank for others' too.

Embedding answers vectors in several types at once; reranking sorts documents by their relevance to a query.
Sources: https://docs.cohere.com/reference/embed, https://docs.cohere.com/reference/rerank, https://jina.ai/reranker and
https://docs.voyageai.com/reference/reranker-api
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from builder.serving.gateway.context import RequestContext
from builder.serving.gateway.encoders import (
    MAX_DOCUMENTS,
    embed,
    is_reranker,
    rank_scores,
    relevance_scores,
    resize,
)
from builder.serving.gateway.errors import bad_field
from builder.serving.gateway.input_types import input_type_options
from builder.serving.gateway.openai.embeddings import MAX_TEXTS
from builder.serving.gateway.quantization import Encoding, encode
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.tei import TeiRerankRequest, rank, tei_errors
from builder.serving.gateway.validation import StrictBody

InputType = Literal["search_document", "search_query", "classification", "clustering"]
SIDES = {"START": "left", "END": "right"}


class RerankRequest(StrictBody):
    """Cohere's and Jina's body, with `top_k` and `truncation` of Voyage, whose clients send both."""

    model: str | None = None
    query: str
    documents: Annotated[list[str | dict[str, Any]], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = False
    truncate: bool | None = None
    instruction: str | None = None
    max_tokens_per_doc: int | None = Field(None, ge=1)  # Cohere's: longer documents are cut
    top_k: int | None = Field(None, ge=1)
    truncation: bool | None = None

    @property
    def is_voyage(self) -> bool:
        """True if a client of Voyage's sent the request, which reads another answer."""
        return bool({"top_k", "truncation"} & self.model_fields_set)

    def options(self, model: ServedModel) -> dict[str, Any]:
        """Return the inputs of the model. Raises ApiError if it cuts documents at more tokens than requested."""
        truncate = self.one_of("truncate", "truncation")
        if self.max_tokens_per_doc is not None:
            limit = model.max_input_length
            if limit is None or limit > self.max_tokens_per_doc:
                message = (
                    f"{model.name} cuts documents at its own limit of {limit} tokens; leave max_tokens_per_doc out"
                )
                raise bad_field("max_tokens_per_doc", message)
            return {"truncate": truncate is not False}
        return {} if truncate is None else {"truncate": truncate}


async def rerank(context: RequestContext) -> dict[str, Any]:
    """Rank the documents, the most relevant first. Scores are the model's own: 0 to 1 if it ends in a sigmoid."""
    body: RerankRequest = context.body
    model = await context.model_for("for text-ranking", is_reranker, body.model)
    texts = [_text(number, document) for number, document in enumerate(body.documents)]
    options = body.options(model)
    if body.instruction is not None:
        options["instruction"] = _instruction(model, body.instruction)
    scores = await relevance_scores(context, model, body.query, texts, options)
    best = rank_scores(scores)[: body.one_of("top_n", "top_k")]
    results: list[dict[str, Any]] = [{"index": index, "relevance_score": score} for index, score in best]
    if body.return_documents:
        for result in results:
            text = texts[result["index"]]
            result["document"] = text if body.is_voyage else {"text": text}
    used = context.record.prompt_tokens
    answer = {"model": model.label, "usage": {"prompt_tokens": used, "total_tokens": used}}
    if body.is_voyage:
        return {"object": "list", "data": results, **answer}
    return {
        "id": context.record.id,
        **answer,
        "results": results,
        "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
    }


def _instruction(model: ServedModel, text: str) -> str:
    if "instruction" not in model.inputs:
        raise bad_field("instruction", f"{model.name} reads no instruction; leave it out")
    return text


async def either_rerank(context: RequestContext) -> Any:
    """Serve POST /rerank: TEI's shape if the body has texts, Jina's and Cohere's if it has documents."""
    if "texts" in context.body.model_extra:
        with tei_errors():
            return await rank(context.with_body(TeiRerankRequest))
    return await rerank(context.with_body(RerankRequest))


def _text(number: int, document: str | dict[str, Any]) -> str:
    if isinstance(document, str):
        return document
    text = document.get("text")
    if not isinstance(text, str) or len(document) > 1:
        raise bad_field("documents", f'documents[{number}] is neither text nor {{"text": "..."}}')
    return text


class CohereTextPart(StrictBody):
    type: Literal["text"]
    text: str


class CohereInput(StrictBody):
    content: Annotated[list[CohereTextPart], Field(min_length=1)]


class CohereEmbedRequest(StrictBody):
    """Body of either version. Models here read texts, and truncate them at their own limit."""

    model: str | None = None
    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    inputs: Annotated[list[CohereInput], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    input_type: InputType | None = None
    embedding_types: Annotated[list[Encoding], Field(min_length=1)] | None = None
    output_dimension: int | None = Field(None, ge=1)
    truncate: Literal["NONE", "START", "END"] | None = None

    def all_texts(self) -> list[str]:
        """Return the texts; the parts of one input are joined by newlines. Raises ApiError."""
        if (self.texts is None) == (self.inputs is None):
            raise bad_field("texts", "send texts, or inputs with parts of text")
        if self.texts is not None:
            return self.texts
        return ["\n".join(part.text for part in entry.content) for entry in self.inputs or []]

    def options(self, model: ServedModel) -> dict[str, Any]:
        """Return the inputs of the model. Raises ApiError if it cannot truncate on the requested side."""
        if self.truncate in SIDES:
            model.refuse_truncation_side("truncate", SIDES[self.truncate])
        return {"truncate": self.truncate != "NONE", **input_type_options(model, self.input_type)}


async def embed_v1(context: RequestContext) -> dict[str, Any]:
    """Serve POST /v1/embed: the vectors as numbers, unless the request names types."""
    return await _embed(context, "1", None)


async def embed_v2(context: RequestContext) -> dict[str, Any]:
    """Serve POST /v2/embed: the vectors by type, as numbers unless the request names others."""
    return await _embed(context, "2", ["float"])


async def _embed(context: RequestContext, version: str, default_types: list[Encoding] | None) -> dict[str, Any]:
    """Return the vectors by type; without types, one list of them."""
    body: CohereEmbedRequest = context.body
    texts, types = body.all_texts(), body.embedding_types or default_types
    model = await context.model_for("for embeddings", lambda model: model.is_embedder, body.model)
    vectors = resize(
        await embed(context, model, texts, **body.options(model)), body.output_dimension, "output_dimension"
    )
    embeddings: Any = vectors if types is None else {kind: [encode(v, kind) for v in vectors] for kind in types}
    meta = {"api_version": {"version": version}, "billed_units": {"input_tokens": context.record.prompt_tokens}}
    response_type = "embeddings_floats" if types is None else "embeddings_by_type"
    head = {"id": context.record.id, "response_type": response_type, "texts": texts, "meta": meta}
    return {**head, "embeddings": embeddings}
