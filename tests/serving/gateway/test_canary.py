"""A share of a model's requests goes to its candidate: the clients that get it, the counters, and no visible trace."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from tritonclient.grpc import model_config_pb2, service_pb2

from builder.common.errors import ServeError
from builder.serving.gateway import canary
from builder.serving.gateway.access_log import AccessLog
from builder.serving.gateway.app import make_app
from builder.serving.gateway.backend import Metadata
from builder.serving.gateway.catalogue import Catalogue
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.settings import GatewaySettings
from builder.serving.gateway.tensors import Output
from builder.serving.promotion.canary import CanaryFigures, CanaryShare, watch
from tests.serving.gateway.asgi import Answer, ask
from tests.serving.gateway.fake_triton import MODELS, FakeTriton

SECRET = {"authorization": "Bearer secret"}
EMBED = {"model": "embeds", "input": "Hello"}
CHAT: dict[str, Any] = {"model": "writes", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


class WithCandidates(FakeTriton):
    """Triton with a candidate for each of two models, which fails after that many answers of a request, or never."""

    def __init__(self, fails_after: int | None = None, status: int = 500) -> None:
        super().__init__()
        self.fails_after, self.status = fails_after, status
        self.names: list[str] = []

    async def index(self) -> list[tuple[str, str]]:
        return [*await super().index(), ("embeds-candidate", "2"), ("writes-candidate", "2")]

    async def config(self, name: str, version: str) -> model_config_pb2.ModelConfig:
        config = await super().config(name.removesuffix("-candidate"), version)
        if name.endswith("-candidate"):
            config.name = name
            config.parameters["candidate_of"].string_value = name.removesuffix("-candidate")
        return config

    async def infer(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> dict[str, Output]:
        self._fail(request.model_name, 0)
        return await super().infer(self._named(request), metadata)

    async def stream(
        self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()
    ) -> AsyncGenerator[dict[str, Output], None]:
        name, answered = request.model_name, 0
        self._fail(name, 0)
        async for outputs in super().stream(self._named(request), metadata):
            self._fail(name, answered)
            answered += 1
            yield outputs

    def _fail(self, name: str, answered: int) -> None:
        if name.endswith("-candidate") and answered == self.fails_after:
            raise ApiError(self.status, "the candidate has no memory")

    def _named(self, request: service_pb2.ModelInferRequest) -> service_pb2.ModelInferRequest:
        self.names.append(request.model_name)
        copy = service_pb2.ModelInferRequest()
        copy.CopyFrom(request)
        copy.model_name = request.model_name.removesuffix("-candidate")
        return copy


@pytest.fixture(autouse=True)
def _no_order_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no lease end by itself, however long the requests of a test take."""
    monkeypatch.setattr(canary, "LEASE_S", 3600.0)


def gateway(triton: FakeTriton, **settings: Any) -> AccessLog:
    return make_app(GatewaySettings(**{"admin_key": "secret", **settings}), triton, None, models=Catalogue(triton))


def fetch(app: AccessLog, path: str, body: Any = None, **options: Any) -> Answer:
    return asyncio.run(ask(app, path, body, **options))


def ordered(app: AccessLog, share: float, model: str = "embeds", **options: Any) -> Answer:
    body = {"model": model, "candidate": f"{model}-candidate", "versions": [1, 2], "share": share}
    return fetch(app, "/admin/canary", body, **{"headers": SECRET, **options})


def test_canary_share_is_stable_per_request_id() -> None:
    triton = WithCandidates()
    app = gateway(triton)
    assert ordered(app, 0.25).status == 200
    ids = [f"request-{number}" for number in range(200)]
    for _ in range(2):
        for one in ids:
            assert fetch(app, "/v1/embeddings", EMBED, headers={"x-request-id": one}).json["model"] == "embeds"
    assert triton.names[:200] == triton.names[200:]
    share = triton.names.count("embeds-candidate") / len(triton.names)
    assert 0.15 < share < 0.35
    figures = ordered(app, 0.0).json
    assert figures["candidate"]["answers"] == triton.names.count("embeds-candidate")
    assert figures["running"]["answers"] == triton.names.count("embeds")
    assert (figures["running"]["version"], figures["candidate"]["version"]) == (1, 2)
    assert figures["candidate"]["first_ms"]["p50"] > 0
    metrics = b"".join(fetch(app, "/metrics").pieces).decode()
    assert 'build_repo_gateway_canary_seconds_count{model_name="embeds",version="2"}' in metrics
    triton.names.clear()
    for one in ids:
        fetch(app, "/v1/embeddings", EMBED, headers={"x-request-id": one})
    assert set(triton.names) == {"embeds"}, "it is over"


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_canary_falls_back_to_the_running_version(status: int) -> None:
    app = gateway(WithCandidates(fails_after=0, status=status))
    ordered(app, 1.0)
    ordered(app, 1.0, "writes")
    assert fetch(app, "/v1/embeddings", EMBED).status == 200
    answer = fetch(app, "/v1/chat/completions", {**CHAT, "stream": True})
    assert answer.status == 200
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in answer.events[:-1]) == "0 1 2 "
    for model in ("embeds", "writes"):
        figures = ordered(app, 0.0, model).json
        assert figures["candidate"]["failures"] == 1
        assert figures["candidate"]["failure"] == "the candidate has no memory"
        assert (figures["running"]["answers"], figures["running"]["failures"]) == (1, 0)


def test_canary_ignores_bad_requests() -> None:
    app = gateway(WithCandidates())
    ordered(app, 1.0)
    assert fetch(app, "/v1/embeddings", {**EMBED, "input": " "}).status == 400
    figures = ordered(app, 0.0).json
    assert [figures[side][count] for side in figures for count in ("answers", "failures")] == [0, 0, 0, 0]


def test_canary_counts_a_stream_that_breaks_off() -> None:
    triton = WithCandidates(fails_after=1)
    app = gateway(triton)
    ordered(app, 1.0, "writes")
    answer = fetch(app, "/v1/chat/completions", {**CHAT, "stream": True})
    assert answer.events[-1]["error"]["message"] == "the candidate has no memory"
    figures = ordered(app, 0.0, "writes").json
    assert (figures["candidate"]["answers"], figures["candidate"]["failures"]) == (1, 1)
    assert triton.running == 0


def test_canary_expires_when_not_renewed() -> None:
    now = 0.0
    triton = WithCandidates()
    split = canary.CanaryBackend(
        triton, make_app(GatewaySettings(), triton, None, models=Catalogue(triton)).metrics, lambda: now
    )
    split.set_canary(canary.CanaryRequest(model="embeds", candidate="embeds-candidate", versions=(1, 2), share=1.0))
    assert split._canary("embeds") is not None
    now = canary.LEASE_S
    assert split._canary("embeds") is None


def test_admin_api_needs_its_own_key() -> None:
    assert ordered(gateway(WithCandidates(), admin_key=""), 0.1).status == 403
    app = gateway(WithCandidates(), keys=(("ann", "sk-1"),))
    assert ordered(app, 0.1, headers={}).status == 401
    assert ordered(app, 0.1, headers={"authorization": "Bearer sk-1"}).status == 401, "a client is not who gives orders"
    assert ordered(app, 0.1).status == 200
    assert fetch(app, "/v1/models", headers=SECRET).status == 401, "nor the other way round"


def test_canary_needs_a_candidate_that_clients_cannot_name() -> None:
    app = gateway(WithCandidates())
    body = {"model": "embeds", "candidate": "writes-candidate", "versions": [1, 2], "share": 0.5}
    refused = fetch(app, "/admin/canary", body, headers=SECRET)
    assert (refused.status, refused.error["message"]) == (
        404,
        "writes-candidate is not a candidate to replace embeds",
    )
    assert ordered(app, 0.1, "absent").status == 404
    assert ordered(app, 1.5).status == 400
    models = [model["id"] for model in fetch(app, "/v1/models").json["data"]]
    assert models == sorted(MODELS)
    assert fetch(app, "/embed", {"inputs": "Hello"}).status == 200, "the only model for vectors is still the only one"


TOO_FEW = "10 requests came to it in 0 s, and 50 are needed to judge by: watch longer (--watch), or with a larger share"


def _figures(answers: int, failures: int = 0, ms: float = 10.0, between: float | None = None) -> CanaryFigures:
    times = {"first_ms": {"p50": 10.0, "p90": 1.0, "p99": 1.0}, "between_ms": {"p50": between and 5.0}}
    running = {"version": 1, "answers": 900, "failures": 9, "failure": "", **times}
    own = {"first_ms": {"p50": ms, "p90": ms, "p99": ms}, "between_ms": {"p50": between}}
    return CanaryFigures(
        running, {"version": 2, "answers": answers, "failures": failures, "failure": "no memory", **own}
    )


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        (_figures(100), []),
        (_figures(99, 1), []),
        (_figures(95, 5), ["5 of its 100 requests failed (5.0%; of version 1 1.0%): no memory"]),
        (_figures(100, ms=20.0), ["it takes 2.00 times as long until the first answer; at most 1.5 is allowed"]),
        (
            _figures(100, between=15.0),
            ["it takes 3.00 times as long between the answers of a stream; at most 1.5 is allowed"],
        ),
        (_figures(10), [TOO_FEW]),
    ],
)
def test_canary_watch_ends_a_worse_candidate(figures: CanaryFigures, says: list[str]) -> None:
    shares = []

    def order(share: float) -> CanaryFigures:
        shares.append(share)
        return figures

    assert watch(order, 0.1, 0.0, 1.5, poll_s=0.0) == (figures, says)
    assert shares == [0.1, 0.0], "it has no share after"


def test_canary_watch_ends_early_when_the_candidate_fails() -> None:
    looks, shown = iter([_figures(3, 3), _figures(30, 30), _figures(0, 0)]), list[tuple[int, bool]]()
    figures, says = watch(
        lambda share: next(looks),
        0.1,
        3600.0,
        1.5,
        poll_s=0.0,
        on_figures=lambda figures, left: shown.append((figures.requests, 3500 < left <= 3600)),
    )
    assert figures.requests == 60
    assert "30 of its 60 requests failed" in says[0]
    assert shown == [(6, True)], "the requests so far, and the seconds that are left"


def test_canary_share_reports_refusing_and_absent_gateways() -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.dumps({"error": {"message": "the admin API is disabled"}}).encode()
            self.send_response(403)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *anything: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        share = CanaryShare(f"http://127.0.0.1:{server.server_port}", "k", "embeds", "embeds-candidate", (1, 2), 0.1)
        with pytest.raises(ServeError, match="refuses the canary: the admin API is disabled"):
            share.order(0.1)
        thread.join()
    with pytest.raises(ServeError, match="start one: build-repo gateway --admin-key FILE"):
        share.order(0.1)
