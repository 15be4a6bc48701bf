"""The gateway's application over a stand-in for Triton: routes, bodies, disconnects, time limits and draining."""

from __future__ import annotations

import asyncio
import io
import json
import re
import subprocess
import sys

import pytest

from builder.serving.gateway.triton import stream_error
from tests.serving.gateway.asgi import Answer, ask
from tests.serving.gateway.fake_triton import FakeTriton
from tests.serving.gateway.requests import CHAT, fetch, gateway


def test_gateway_process_imports_no_torch() -> None:
    program = "import sys, builder.commands.gateway, builder.serving.gateway.server; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "uvicorn" in loaded
    assert not loaded & {"torch", "transformers", "onnx", "onnxruntime", "openvino", "tokenizers", "optimum"}


def test_models_lists_models_with_a_task() -> None:
    models = fetch("/v1/models").json["data"]
    names = ["embeds", "features", "guided", "ranks", "sparse", "thinks", "topics", "writes"]
    assert [model["id"] for model in models] == names
    shown = fetch("/v1/models/writes").json
    assert (shown["task"], shown["max_model_len"], shown["chat"]) == ("text-generation", 64, True)
    assert shown["report"] is None
    assert fetch("/v1/models/embeds").json["report"]["speed_up"] == 3.12
    missing = fetch("/v1/models/other")
    assert missing.status == 404
    assert (
        "available models: embeds, features, guided, ranks, sparse, thinks, topics, writes" in missing.error["message"]
    )


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[1]", 400),
        (b'{"model": NaN}', 400),
        (b'{"model": 1e999}', 400),
        (b"\xff\xfe\xfd", 400),
        (b"[" * 100_000, 400),
        (b'{"input": ' + b"9" * 5000 + b"}", 400),
        (b" " * 2000, 413),
    ],
)
def test_gateway_refuses_malformed_bodies(body: bytes, status: int) -> None:
    limit = 1000 if status == 413 else 1 << 20
    assert fetch("/v1/embeddings", body, gateway(max_body=limit)).status == status


def test_gateway_refuses_other_paths_methods_and_media_types() -> None:
    assert fetch("/v1/other").status == 404
    assert fetch("/v1/embeddings").status == 405
    assert fetch("/v1/embeddings", {}, headers={"content-type": "text/plain"}).status == 415


def test_openapi_describes_every_route() -> None:
    document = fetch("/openapi.json").json
    paths = document["paths"]
    assert {"/v1/chat/completions", "/v1/tasks/{task}", "/rerank", "/openapi.json"} <= set(paths)
    assert "/embed_sparse" in paths
    chat = paths["/v1/chat/completions"]["post"]
    assert chat["summary"] == "Answer a chat with a completion, or a stream of its chunks."
    schema = chat["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["model", "messages"]
    assert schema["properties"]["messages"]["items"] == {"$ref": "#/components/schemas/Message"}
    assert "text/event-stream" in chat["responses"]["200"]["content"]
    (parameter,) = paths["/v1/tasks/{task}"]["post"]["parameters"]
    assert (parameter["name"], parameter["in"]) == ("task", "path")
    references = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert references == set(document["components"]["schemas"])


@pytest.mark.parametrize(("stream", "disconnect_after"), [(True, 1), (True, 0), (False, 0)])
def test_gateway_ends_request_when_client_disconnects(stream: bool, disconnect_after: int) -> None:
    triton = FakeTriton(step_s=0.001)
    log = io.StringIO()
    body = {**CHAT, "max_tokens": 64, "stream": stream}
    fetch("/v1/chat/completions", body, gateway(triton, log), disconnect_after=disconnect_after)
    assert triton.running == 0
    assert json.loads(log.getvalue())["status"] == 499


async def test_disconnect_during_model_lookup_keeps_other_requests() -> None:
    triton = FakeTriton()
    triton.index_s = 0.05
    app = gateway(triton)
    first = asyncio.ensure_future(ask(app, "/v1/chat/completions", CHAT, disconnect_after=0))
    second = asyncio.ensure_future(ask(app, "/v1/chat/completions", CHAT))
    assert (await asyncio.gather(first, second))[1].status == 200


def test_request_timeout_ends_the_answer() -> None:
    triton, body = FakeTriton(), {**CHAT, "max_tokens": 64}
    triton.may_answer = asyncio.Event()  # but for the first token
    whole = fetch("/v1/chat/completions", body, gateway(triton, timeout_s=0.1))
    assert (whole.status, whole.error["code"]) == (504, "timeout")
    assert triton.running == 0
    triton.may_answer = asyncio.Event()
    streamed = fetch("/v1/chat/completions", {**body, "stream": True}, gateway(triton, timeout_s=2))
    assert streamed.status == 200, "its first token came before"
    assert streamed.events[-1]["error"]["code"] == "timeout"
    assert triton.running == 0


def test_draining_gateway_refuses_new_and_finishes_running() -> None:
    triton = FakeTriton()
    triton.may_answer = may_answer = asyncio.Event()
    app = gateway(triton)

    async def run() -> tuple[Answer, Answer, Answer]:
        running = asyncio.ensure_future(ask(app, "/v1/chat/completions", CHAT))
        while not app.active:
            await asyncio.sleep(0.001)
        app.draining = True
        refused, alive = await ask(app, "/v1/models"), await ask(app, "/health")
        assert app.active == 1
        may_answer.set()
        return await running, refused, alive

    answered, refused, alive = asyncio.run(run())
    assert (answered.status, refused.status, alive.status) == (200, 503, 200)
    assert refused.headers["retry-after"] == "5"
    assert app.active == 0


def test_health_ready_follows_triton() -> None:
    triton = FakeTriton()
    assert fetch("/health/ready", app=gateway(triton)).status == 200
    assert fetch("/-/healthz", app=gateway(triton)).pieces == [b"success"], "KubeRay looks for this word"
    triton.up = False
    assert fetch("/health/ready", app=gateway(triton)).status == 503
    assert fetch("/-/healthz", app=gateway(triton)).status == 503


def test_traceparent_is_forwarded_when_enabled() -> None:
    headers = {"traceparent": "00-1-2-01"}
    for forwards, expected in ((True, (("traceparent", "00-1-2-01"),)), (False, ())):
        triton = FakeTriton()
        fetch("/v1/chat/completions", CHAT, gateway(triton, forward_traces=forwards), headers=headers)
        assert tuple(triton.metadata[0]) == expected


def test_cors_allows_configured_origins() -> None:
    origin = {"origin": "https://a.example", "access-control-request-method": "POST"}
    headers = {**origin, "access-control-request-headers": "content-type"}
    allowed = fetch("/v1/embeddings", headers=headers, method="OPTIONS", app=gateway(cors=("https://a.example",)))
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in fetch("/v1/embeddings", headers=headers, method="OPTIONS").headers


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("max_tokens is 5000; after a prompt of 1 tokens it can be 1 to 127", 400),
        ("2 sequences wait already and the limit is 2; send the request again later", 429),
        ("the request's time was over after 3 tokens", 504),
        ("this request failed inside the model: EngineFailed: the decode loop failed earlier", 500),
        ("Request for unknown model: 'x' is not found", 503),
        ("Request for unknown model: 'x' has no available versions", 503),
        ("GRPC server is shutting down and has stopped accepting new requests.", 503),
    ],
)
def test_stream_error_text_selects_the_status(message: str, status: int) -> None:
    assert stream_error(message).status == status
