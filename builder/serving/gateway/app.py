"""Define routes and middleware as a pure ASGI application, without a task between a streamed step and its client."""

from __future__ import annotations

import asyncio
import logging
import sys
from importlib.resources import files
from typing import Any, TextIO

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from builder.serving.gateway import canary, cohere, multivectors, tasks, tei, tokenize, vllm
from builder.serving.gateway.access_log import AccessLog
from builder.serving.gateway.adapters import AdaptedModels, AdapterRegistry
from builder.serving.gateway.anthropic.messages import count_tokens, create_message
from builder.serving.gateway.anthropic.request import CountTokensRequest, MessagesRequest
from builder.serving.gateway.auth import AuthMiddleware
from builder.serving.gateway.backend import Backend
from builder.serving.gateway.context import RECORD, GatewayState, RequestContext
from builder.serving.gateway.endpoint import Endpoint
from builder.serving.gateway.errors import ApiError, anthropic_error, openai_error, tei_error
from builder.serving.gateway.generation.chat import ChatCompletionRequest
from builder.serving.gateway.http_responses import RawResponse, send_error
from builder.serving.gateway.limits import RateLimits
from builder.serving.gateway.metrics import Metrics, cache_usage
from builder.serving.gateway.openai import chat, completions, embeddings
from builder.serving.gateway.openai.models import list_models, show_model
from builder.serving.gateway.openai.responses.request import ResponsesRequest
from builder.serving.gateway.openai.responses.route import create_response
from builder.serving.gateway.openapi import ApiRoute, document
from builder.serving.gateway.settings import GatewaySettings
from builder.serving.gateway.validation import ExtensibleBody

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def make_app(
    settings: GatewaySettings,
    triton: Backend,
    log: TextIO | None = sys.stdout,
    *,
    models: AdapterRegistry,
    metrics: Metrics | None = None,
    limits: RateLimits | None = None,
) -> AccessLog:
    """Return the gateway over `triton`: a gateway.triton.Triton or another Backend. `models`: the models it offers.

    `limits`: those of its keys; by default of this process alone.
    """
    metrics = metrics or Metrics()
    backend = canary.CanaryBackend(triton, metrics)
    gateway = GatewayState(settings, backend, AdaptedModels(models), metrics)
    app: ASGIApp = ErrorMiddleware(Router(routes(gateway)))
    app = AuthMiddleware(app, settings, limits or RateLimits(settings))
    if settings.cors:
        app = CORSMiddleware(app, allow_origins=settings.cors, allow_methods=["*"], allow_headers=["*"])
    return AccessLog(app, metrics, log)


def routes(gateway: GatewayState) -> list[BaseRoute]:
    """Return every route; each is an Endpoint."""
    return [
        Route(api.path, Endpoint(gateway, api.handler, api.schema, api.errors[0]), methods=[api.method]) for api in APIS
    ]


class ErrorMiddleware:
    """ASGI middleware that answers the refusals of the router and unexpected exceptions in OpenAI's shape."""

    def __init__(self, router: Router) -> None:
        self.router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        scope["app"] = self  # makes the router raise its refusals
        try:
            await self.router(scope, receive, send)
            return
        except HTTPException as refusal:
            path, status = scope["path"], refusal.status_code
            messages = {404: f"there is no {path} here", 405: f"{path} does not take {scope['method']}"}
            error = ApiError(status, messages.get(status, refusal.detail))
        except Exception:
            logging.getLogger(__name__).exception("a request failed")
            if scope[RECORD].has_response:
                raise
            error = ApiError(500, "this request failed inside the gateway; its log has the reason")
        scope[RECORD].set_error(error)
        await send_error(send, error)


async def page(context: RequestContext) -> RawResponse:
    """Serve GET /: the models, and a form to try each."""
    return RawResponse(
        files("builder.serving.gateway").joinpath("page.html").read_bytes(), "text/html; charset=utf-8", PAGE_HEADERS
    )


async def health(context: RequestContext) -> dict[str, str]:
    """Serve GET /health: this process is alive."""
    return {"status": "ok"}


async def ready(context: RequestContext) -> dict[str, str]:
    """Serve GET /health/ready: Triton is ready too. Raises ApiError 503 otherwise."""
    if not await context.gateway.triton.ready():
        raise ApiError(503, f"Triton at {context.gateway.settings.triton} is not ready", retry_after=2)
    return {"status": "ready"}


async def ray_health(context: RequestContext) -> RawResponse:
    """Serve GET /-/healthz, where KubeRay asks each node and expects the answer of Ray's own proxy."""
    await ready(context)
    return RawResponse(b"success", "text/plain")


async def metrics_text(context: RequestContext) -> RawResponse:
    """Serve GET /metrics, for Prometheus."""
    text, below = context.gateway.metrics.text(), context.gateway.settings.triton_metrics
    if below is not None:
        text += await asyncio.to_thread(cache_usage, below)
    return RawResponse(text, "text/plain; version=0.0.4; charset=utf-8")


async def openapi(context: RequestContext) -> dict[str, Any]:
    """Serve GET /openapi.json: the description of this API."""
    return document(APIS)


TEI = (tei_error,)
EITHER = (openai_error, tei_error)
RERANK_BODIES = (cohere.RerankRequest, tei.TeiRerankRequest)
TOKENIZE_BODIES = (tokenize.TeiTokenizeRequest, tokenize.TokenizeRequest)
TEI_BODIES = (
    tei.TeiEmbedRequest,
    tei.TeiTextsRequest,
    tei.TeiPredictRequest,
    tei.TeiRerankRequest,
    tei.TeiSimilarityRequest,
)

APIS = (
    ApiRoute("GET", "/", page),
    ApiRoute("GET", "/health", health),
    ApiRoute("GET", "/health/ready", ready),
    ApiRoute("GET", "/-/healthz", ray_health, documented=False),
    ApiRoute("GET", "/metrics", metrics_text),
    ApiRoute("GET", "/openapi.json", openapi),
    ApiRoute("GET", "/v1/models", list_models),
    ApiRoute("GET", "/v1/models/{name}", show_model),
    ApiRoute("POST", "/v1/chat/completions", chat.create_chat_completion, ChatCompletionRequest),
    ApiRoute("POST", "/v1/responses", create_response, ResponsesRequest),
    ApiRoute("POST", "/v1/messages", create_message, MessagesRequest, (anthropic_error,)),
    ApiRoute("POST", "/v1/messages/count_tokens", count_tokens, CountTokensRequest, (anthropic_error,)),
    ApiRoute("POST", "/v1/completions", completions.create_completion, completions.CompletionRequest),
    ApiRoute("POST", "/v1/embeddings", embeddings.create_embedding, embeddings.EmbeddingRequest),
    ApiRoute("POST", "/embeddings", embeddings.create_embedding, embeddings.EmbeddingRequest),
    ApiRoute("POST", "/v1/multi-vector", multivectors.create_multi_vectors, multivectors.MultiVectorRequest),
    ApiRoute("POST", "/v1/rerank", cohere.rerank, cohere.RerankRequest),
    ApiRoute("POST", "/v2/rerank", cohere.rerank, cohere.RerankRequest),
    ApiRoute("POST", "/v1/embed", cohere.embed_v1, cohere.CohereEmbedRequest),
    ApiRoute("POST", "/v2/embed", cohere.embed_v2, cohere.CohereEmbedRequest),
    ApiRoute("POST", "/score", vllm.score, vllm.ScoreRequest),
    ApiRoute("POST", "/v1/score", vllm.score, vllm.ScoreRequest),
    ApiRoute("POST", "/classify", vllm.classify, vllm.ClassifyRequest),
    ApiRoute("POST", "/pooling", vllm.pooling, vllm.PoolingRequest),
    ApiRoute("POST", "/v1/tasks/{task}", tasks.run, tasks.TaskRequest),
    ApiRoute("POST", "/models/{name}", tasks.run_model, tasks.TaskRequest),
    ApiRoute("POST", "/rerank", cohere.either_rerank, ExtensibleBody, EITHER, RERANK_BODIES),
    ApiRoute("POST", "/embed", tei.embed_texts, tei.TeiEmbedRequest, TEI),
    ApiRoute("POST", "/embed_all", tei.embed_all, tei.TeiEmbedAllRequest, TEI),
    ApiRoute("POST", "/embed_sparse", tei.embed_sparse, tei.TeiTextsRequest, TEI),
    ApiRoute("POST", "/similarity", tei.similarity, tei.TeiSimilarityRequest, TEI),
    ApiRoute("POST", "/", tei.default, ExtensibleBody, TEI, TEI_BODIES),
    ApiRoute("POST", "/predict", tei.predict, tei.TeiPredictRequest, TEI),
    ApiRoute("POST", "/tokenize", tokenize.tokenize, ExtensibleBody, EITHER, TOKENIZE_BODIES),
    ApiRoute("POST", "/detokenize", tokenize.detokenize, tokenize.DetokenizeRequest),
    ApiRoute("POST", "/decode", tokenize.decode, tokenize.TeiDecodeRequest, TEI),
    ApiRoute("GET", "/info", tei.info, errors=TEI),
    ApiRoute("POST", "/admin/canary", canary.set_canary, canary.CanaryRequest, documented=False),
)
