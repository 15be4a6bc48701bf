"""Metrics and the access log."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import threading
from collections.abc import AsyncGenerator
from typing import Any

from builder.serving.gateway.metrics import cache_usage
from tests.serving.gateway.fake_triton import FakeTriton
from tests.serving.gateway.requests import CHAT, fetch, gateway


def test_access_log_has_no_content() -> None:
    log = io.StringIO()
    app = gateway(log=log)
    secret = {**CHAT, "messages": [{"role": "user", "content": "my secret"}]}
    assert fetch("/v1/chat/completions", secret, app, headers={"x-request-id": "r-1"}).headers["x-request-id"] == "r-1"
    fetch("/v1/chat/completions", {**secret, "top_k": "my secret"}, app)
    first, second = map(json.loads, log.getvalue().splitlines())
    assert (first["id"], first["model"], first["completion_tokens"]) == ("r-1", "writes", 3)
    assert (second["status"], second["error"]) == (400, "top_k")
    assert "secret" not in log.getvalue()


def test_metrics_have_the_names_of_vllm_and_tei() -> None:
    app = gateway()
    fetch("/v1/chat/completions", {**CHAT, "stream": True}, app)
    fetch("/v1/embeddings", {"model": "embeds", "input": "abc"}, app)
    text = b"".join(fetch("/metrics", app=app).pieces).decode()
    for line in (
        'vllm:time_to_first_token_seconds_count{model_name="writes"} 1.0',
        'vllm:inter_token_latency_seconds_count{model_name="writes"} 2.0',
        'vllm:e2e_request_latency_seconds_count{model_name="writes"} 1.0',
        'vllm:request_queue_time_seconds_count{model_name="writes"} 1.0',
        'vllm:generation_tokens_total{model_name="writes"} 3.0',
        'vllm:request_success_total{finished_reason="length",model_name="writes"} 1.0',
        'te_request_duration_count{model_name="embeds"} 1.0',
        "build_repo_gateway_unanswered 0.0",
        'build_repo_gateway_responses_total{route="/v1/embeddings",status="200"} 1.0',
    ):
        assert line in text


def test_running_gauge_counts_by_model() -> None:
    """Regression: a scrape counted itself, so that one request was running where none was, and no model was named."""
    seen: list[tuple[float | None, float | None]] = []

    def running(name: str) -> float | None:
        labels = {"model_name": name, "engine": "0"}
        return app.metrics.registry.get_sample_value("vllm:num_requests_running", labels)

    class Noting(FakeTriton):
        async def infer(self, *arguments: Any) -> Any:
            seen.append((running("embeds"), running("writes")))
            return await super().infer(*arguments)

    app = gateway(Noting())
    assert b"vllm:num_requests_running{" not in b"".join(fetch("/metrics", app=app).pieces), "none has been asked for"
    fetch("/info", app=app)
    fetch("/v1/embeddings", {"model": "embeds", "input": "abc"}, app)
    assert seen == [(1, None)]
    assert fetch("/v1/embeddings", {"model": "embeds", "input": "abc", "prompt_name": "x"}, app).status == 400
    assert fetch("/v1/chat/completions", {**CHAT, "stream": True}, app, disconnect_after=1).status == 200
    assert (running("embeds"), running("writes")) == (0, 0)


def test_metrics_omit_cache_usage_when_triton_does_not_answer() -> None:
    app = gateway(triton_metrics="http://127.0.0.1:1/metrics")
    answer = fetch("/metrics", app=app)
    text = b"".join(answer.pieces).decode()
    assert answer.status == 200
    assert "kv_cache_usage" not in text
    assert "build_repo_gateway_unanswered 0.0" in text


def test_cache_usage_is_empty_when_triton_ends_early() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def end_early() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):  # the client may have disconnected
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nbuild_repo_cache_usage{} 0.5\n")

        thread = threading.Thread(target=end_early)
        thread.start()
        port = server.getsockname()[1]
        assert cache_usage(f"http://127.0.0.1:{port}/metrics") == b""
        thread.join()


def test_unanswered_gauge_counts_until_first_token() -> None:
    seen: list[float | None] = []

    class Noting(FakeTriton):
        async def stream(self, *arguments: Any) -> AsyncGenerator[dict[str, Any], None]:
            seen.append(app.metrics.registry.get_sample_value("build_repo_gateway_unanswered"))
            async for outputs in super().stream(*arguments):
                yield outputs
                seen.append(app.metrics.registry.get_sample_value("build_repo_gateway_unanswered"))

    app = gateway(Noting())
    fetch("/v1/chat/completions", {**CHAT, "stream": True}, app)
    assert seen[0] == 1
    assert set(seen[1:]) == {0}
    assert fetch("/v1/chat/completions", {**CHAT, "temperature": -1}, app).status == 400
    assert app.metrics.registry.get_sample_value("build_repo_gateway_unanswered") == 0
