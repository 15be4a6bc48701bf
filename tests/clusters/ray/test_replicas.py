"""Retries of requests whose replica or gateway dies, tested without a cluster."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError
from starlette.types import Message, Receive, Scope, Send
from tritonclient.grpc import service_pb2

from builder.clusters.ray import proxy, replicas
from builder.clusters.ray.application import application
from builder.clusters.ray.proxy import RetryMiddleware
from builder.clusters.ray.replicas import Answer, Refusal, ReplicaBackend, outputs_of, to_refusal
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.tensors import Output
from tests.serving.gateway.asgi import ask

REQUEST = service_pb2.ModelInferRequest(model_name="topics")
GOOD: dict[str, Output] = {"label": Output("BYTES", (1,), b"\x01\x00\x00\x00a")}
AWAY = to_refusal(ApiError(503, "Triton does not answer", code="unavailable"))
GONE = ActorUnavailableError("the actor is gone", None)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "RETRY_DELAYS_S", (0.0, 0.0))
    monkeypatch.setattr(proxy, "RETRY_DELAYS_S", (0.0, 0.0))


def test_ray_import_paths_of_stored_configurations_still_work() -> None:
    assert importlib.import_module("builder.ray.application").application is application
    assert importlib.import_module("builder.ray.proxy").middlewares is proxy.middlewares


class FakeHandle:
    """ray.serve DeploymentHandle whose calls return the next item of `comes`; a list is a stream's answers."""

    def __init__(self, *comes: Any) -> None:
        self.comes = list(comes)
        self.models: list[str] = []
        self.cancelled = 0
        self.infer = self.stream = self.ready = self

    def options(self, multiplexed_model_id: str, stream: bool = False) -> FakeHandle:
        self.models.append(multiplexed_model_id)
        return self

    def remote(self, *_: object) -> FakeCall:
        return FakeCall(self, self.comes.pop(0))


class FakeCall:
    """DeploymentResponse, or its generator."""

    def __init__(self, handle: FakeHandle, comes: Any) -> None:
        self.handle, self.comes = handle, comes

    def cancel(self) -> None:
        self.handle.cancelled += 1

    def __await__(self) -> Any:
        return self._whole().__await__()

    async def _whole(self) -> Any:
        await asyncio.sleep(0)
        if isinstance(self.comes, BaseException):
            raise self.comes
        return await self.comes() if callable(self.comes) else self.comes

    async def __aiter__(self) -> AsyncIterator[Answer]:
        for answer in self.comes:
            if isinstance(answer, BaseException):
                raise answer
            yield answer


async def _stream(handle: FakeHandle) -> list[Any]:
    answers: list[Any] = []
    try:
        async for answer in ReplicaBackend(handle).stream(REQUEST):
            answers.append(answer)
    except ApiError as error:
        answers.append((error.status, error.code))
    return answers


@pytest.mark.parametrize("first", [GONE, AWAY])
def test_replicas_retry_a_request_after_their_replica_died(first: object) -> None:
    handle = FakeHandle(first, first, GOOD)
    assert asyncio.run(ReplicaBackend(handle).infer(REQUEST)) == GOOD
    assert handle.models == ["topics"], "the deployment routes by the model's name"


def test_replicas_stop_retrying_after_a_while() -> None:
    with pytest.raises(ApiError) as refused:
        asyncio.run(ReplicaBackend(FakeHandle(GONE, GONE, GONE, GOOD)).infer(REQUEST))
    assert (refused.value.status, refused.value.code) == (503, "unavailable")
    assert "the actor is gone" in refused.value.message


def test_replicas_do_not_retry_refusals_of_a_model() -> None:
    handle = FakeHandle(Refusal(400, "top_k is -1", "top_k", None, None), GOOD)
    with pytest.raises(ApiError, match="top_k is -1"):
        asyncio.run(ReplicaBackend(handle).infer(REQUEST))
    assert handle.comes == [GOOD]


def test_replicas_cancel_the_call_of_a_disconnected_client() -> None:
    async def leave() -> FakeHandle:
        handle = FakeHandle(lambda: asyncio.sleep(60))
        request = asyncio.ensure_future(ReplicaBackend(handle).infer(REQUEST))
        await asyncio.sleep(0.01)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        return handle

    assert asyncio.run(leave()).cancelled == 1


@pytest.mark.parametrize(
    ("comes", "expected"),
    [
        (([GONE], [GOOD, GOOD]), [GOOD, GOOD]),
        (([AWAY], [GOOD]), [GOOD]),
        (([GOOD, GONE], [GOOD, GOOD]), [GOOD, (503, "unavailable")]),
        (([GOOD, AWAY], [GOOD]), [GOOD, (503, "unavailable")]),
        (([GONE], [GONE], [GONE]), [(503, "unavailable")]),
    ],
)
def test_replicas_retry_a_stream_until_its_first_answer(comes: tuple[Any, ...], expected: list[Any]) -> None:
    assert asyncio.run(_stream(FakeHandle(*comes))) == expected


def test_replicas_pass_errors_through_unchanged() -> None:
    error = ApiError(429, "full", param="model", code="queue_full", retry_after=3)
    with pytest.raises(ApiError) as raised:
        outputs_of(to_refusal(error))
    assert vars(raised.value) == vars(error)


class Proxied:
    """Application behind Ray's proxy: it returns without a response if its gateway died.

    `answers`: the messages of each call.
    """

    def __init__(self, *answers: list[Message]) -> None:
        self.answers = list(answers)
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body)
        for message in self.answers.pop(0):
            await send(message)


def _start(kind: str, status: int = 200) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind.encode())]}


def _body(text: str, more: bool = False) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


JSON = [_start("application/json"), _body("{}")]
EVENTS = "text/event-stream; charset=utf-8"


def test_proxy_retries_a_request_whose_gateway_died() -> None:
    app = Proxied([], JSON)
    answer = asyncio.run(ask(RetryMiddleware(app), "/v1/embeddings", {"input": "a"}))
    assert (answer.status, answer.json) == (200, {})
    assert app.bodies == [b'{"input": "a"}'] * 2


def test_proxy_answers_503_after_repeated_gateway_deaths() -> None:
    answer = asyncio.run(ask(RetryMiddleware(Proxied([], [], [])), "/v1/embeddings", {}))
    assert (answer.status, answer.error["type"]) == (503, "service_unavailable_error")
    assert answer.headers["retry-after"] == "2"


def test_proxy_ends_a_truncated_stream_with_an_error() -> None:
    app = Proxied([_start(EVENTS), _body('data: {"a":1}\n\n', more=True)], JSON)
    answer = asyncio.run(ask(RetryMiddleware(app), "/v1/completions", {}))
    assert [*answer.events[:1], answer.events[-1]["error"]["code"]] == [{"a": 1}, "unavailable"]
    assert len(app.bodies) == 1


@pytest.mark.parametrize("leave", [Proxied([_start(EVENTS), _body("data: [DONE]\n\n")]), Proxied(JSON)])
def test_proxy_passes_complete_responses_through(leave: Proxied) -> None:
    expected = [message["body"] for message in leave.answers[0][1:]]
    assert asyncio.run(ask(RetryMiddleware(leave), "/v1/completions", {})).pieces == expected


def test_proxy_does_not_retry_for_a_disconnected_client() -> None:
    class Left(Proxied):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            self.bodies.append((await receive())["body"])
            assert (await receive())["type"] == "http.disconnect"

    app = Left()
    asyncio.run(ask(RetryMiddleware(app), "/v1/completions", {}, disconnect_after=0))
    assert len(app.bodies) == 1


def test_proxy_does_not_retry_a_large_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "MAX_REPLAY_BYTES", 10)
    app = Proxied([], JSON)
    assert asyncio.run(ask(RetryMiddleware(app), "/v1/embeddings", {"input": "longer"})).status == 503
    assert len(app.bodies) == 1
