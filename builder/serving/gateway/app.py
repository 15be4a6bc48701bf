"""Routes and their middleware, as a pure ASGI application: no task stands between a streamed step and its client."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import replace
from importlib.resources import files
from typing import Any, TextIO

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from builder.serving.gateway import canary, cohere, orders, rerank, tasks, tei, tokenize, vllm
from builder.serving.gateway.access import Access
from builder.serving.gateway.anthropic.errors import anthropic_error
from builder.serving.gateway.anthropic.messages import count_tokens, messages
from builder.serving.gateway.anthropic.request import Body as MessagesBody
from builder.serving.gateway.anthropic.request import CountBody
from builder.serving.gateway.backend import Backend
from builder.serving.gateway.bound import Bound
from builder.serving.gateway.call import Call, Gateway
from builder.serving.gateway.endpoint import Endpoint, Handler, checked, openai_error
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.facts import FACTS, Facts
from builder.serving.gateway.generation.chat import Body as ChatBody
from builder.serving.gateway.journal import Journal
from builder.serving.gateway.metrics import Metrics
from builder.serving.gateway.models import Models
from builder.serving.gateway.openai import chat, completions, embeddings
from builder.serving.gateway.openai.models import list_models, show_model
from builder.serving.gateway.openai.responses.request import Body as ResponsesBody
from builder.serving.gateway.openai.responses.route import respond
from builder.serving.gateway.openapi import Api, document
from builder.serving.gateway.responses import Plain, send_json
from builder.serving.gateway.settings import Settings
from builder.serving.gateway.usage import cache_usage

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def make_app(
    settings: Settings,
    triton: Backend,
    log: TextIO | None = sys.stdout,
    *,
    models: Models,
    metrics: Metrics | None = None,
) -> Journal:
    """Return the gateway over `triton`: a gateway.triton.Triton or another Backend. `models`: the models it offers."""
    metrics = metrics or Metrics()
    split = canary.Split(triton, metrics)
    gateway = Gateway(settings, split, models, metrics, Bound(settings.max_waiting))
    app: ASGIApp = Answering(Router(routes(gateway)))
    app = Access(app, settings)
    if settings.cors:
        app = CORSMiddleware(app, allow_origins=settings.cors, allow_methods=["*"], allow_headers=["*"])
    return Journal(app, metrics, log)


def routes(gateway: Gateway) -> list[BaseRoute]:
    """Return every route; each is an Endpoint."""
    return [
        Route(api.path, Endpoint(gateway, api.handler, api.schema, api.errors[0]), methods=[api.method]) for api in APIS
    ]


class Answering:
    """Middleware around the router: answers its refusals and unexpected exceptions like any other error."""

    def __init__(self, router: Router) -> None:
        self.router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope["app"] = self  # makes the router raise its refusals
        begun = False

        async def sending(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.router(scope, receive, sending)
        except HTTPException as refusal:
            path = scope["path"]
            says = {404: f"there is no {path} here", 405: f"{path} does not take {scope['method']}"}
            await _refuse(scope, send, ApiError(refusal.status_code, says.get(refusal.status_code, refusal.detail)))
        except Exception:
            logging.getLogger(__name__).exception("a request failed")
            if begun:
                raise
            await _refuse(scope, send, ApiError(500, "this request failed inside the gateway; its log has the reason"))


async def _refuse(scope: Scope, send: Send, error: ApiError) -> None:
    facts: Facts = scope[FACTS]
    facts.refused(error)
    await send_json(send, error.status, error.body, error.headers)


async def page(call: Call) -> Plain:
    """Serve GET /: the models, and a form to try each."""
    return Plain(
        files("builder.serving.gateway").joinpath("page.html").read_bytes(), "text/html; charset=utf-8", PAGE_HEADERS
    )


async def health(call: Call) -> dict[str, str]:
    """Serve GET /health: this process is alive."""
    return {"status": "ok"}


async def ready(call: Call) -> dict[str, str]:
    """Serve GET /health/ready: Triton is ready too. Raises ApiError 503 otherwise."""
    if not await call.gateway.triton.ready():
        raise ApiError(503, f"Triton at {call.gateway.settings.triton} is not ready", retry_after=2)
    return {"status": "ready"}


async def metrics_text(call: Call) -> Plain:
    """Serve GET /metrics, for Prometheus."""
    text, below = call.gateway.metrics.text(), call.gateway.settings.triton_metrics
    if below is not None:
        text += await asyncio.to_thread(cache_usage, below)
    return Plain(text, "text/plain; version=0.0.4; charset=utf-8")


async def either_rerank(call: Call) -> Any:
    """Serve POST /rerank: TEI's shape if the body has texts, Jina's and Cohere's if it has documents."""
    fields = call.body.model_extra
    if "texts" in fields:
        with tei.tei_errors():
            return await tei.rank(replace(call, body=checked(tei.RerankBody, fields)))
    return await rerank.rerank(replace(call, body=checked(rerank.Body, fields)))


async def openapi(call: Call) -> dict[str, Any]:
    """Serve GET /openapi.json: the description of this API."""
    return document(APIS)


def _tei(path: str, handler: Handler, schema: type[BaseModel]) -> Api:
    return Api("POST", path, handler, schema, (tei.tei_error,))


TEI_BODIES = (tei.EmbedBody, tei.SparseBody, tei.PredictBody, tei.RerankBody, tei.SimilarityBody)
EITHER_ERROR = (openai_error, tei.tei_error)


APIS = (
    Api("GET", "/", page),
    Api("GET", "/health", health),
    Api("GET", "/health/ready", ready),
    Api("GET", "/metrics", metrics_text),
    Api("GET", "/openapi.json", openapi),
    Api("GET", "/v1/models", list_models),
    Api("GET", "/v1/models/{name}", show_model),
    Api("POST", "/v1/chat/completions", chat.chat, ChatBody),
    Api("POST", "/v1/responses", respond, ResponsesBody),
    Api("POST", "/v1/messages", messages, MessagesBody, (anthropic_error,)),
    Api("POST", "/v1/messages/count_tokens", count_tokens, CountBody, (anthropic_error,)),
    Api("POST", "/v1/completions", completions.completions, completions.Body),
    Api("POST", "/v1/embeddings", embeddings.embeddings, embeddings.Body),
    Api("POST", "/embeddings", embeddings.embeddings, embeddings.Body),
    Api("POST", "/v1/rerank", rerank.rerank, rerank.Body),
    Api("POST", "/v2/rerank", rerank.rerank, rerank.Body),
    Api("POST", "/v1/embed", cohere.embed_v1, cohere.Body),
    Api("POST", "/v2/embed", cohere.embed_v2, cohere.Body),
    Api("POST", "/score", vllm.score, vllm.ScoreBody),
    Api("POST", "/v1/score", vllm.score, vllm.ScoreBody),
    Api("POST", "/classify", vllm.classify, vllm.ClassifyBody),
    Api("POST", "/pooling", vllm.pooling, vllm.PoolingBody),
    Api("POST", "/v1/tasks/{task}", tasks.run, tasks.Body),
    Api("POST", "/models/{name}", tasks.run_model, tasks.Body),
    Api("POST", "/rerank", either_rerank, tei.RawBody, EITHER_ERROR, (rerank.Body, tei.RerankBody)),
    _tei("/embed", tei.embed_texts, tei.EmbedBody),
    _tei("/embed_all", tei.embed_tokens, tei.TokensBody),
    _tei("/embed_sparse", tei.embed_sparse, tei.SparseBody),
    _tei("/similarity", tei.similarity, tei.SimilarityBody),
    Api("POST", "/", tei.default, tei.RawBody, (tei.tei_error,), TEI_BODIES),
    _tei("/predict", tei.predict, tei.PredictBody),
    Api("POST", "/tokenize", tokenize.tokenize, tei.RawBody, EITHER_ERROR, (tokenize.TeiBody, tokenize.Body)),
    Api("POST", "/detokenize", tokenize.detokenize, tokenize.DetokenizeBody),
    _tei("/decode", tokenize.decode, tokenize.DecodeBody),
    Api("GET", "/info", tei.info, errors=(tei.tei_error,)),
    Api("POST", "/admin/canary", orders.order, canary.Order, documented=False),
)
