"""Calls whose client disconnects or whose model loses them, as seen by their server, a small gRPC one."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from tritonclient.grpc import service_pb2

from builder.serving.gateway import pending_calls
from builder.serving.gateway import triton as triton_module
from builder.serving.gateway.errors import ApiError
from tests.serving.gateway.grpc_server import REQUEST, FakeGrpcServer, ask_and_disconnect, serving


async def test_abandoned_call_is_cancelled_on_new_servers() -> None:
    async with serving(FakeGrpcServer("2.59.0")) as (fake, triton):
        await ask_and_disconnect(fake, triton)
        await fake.ended.wait()
        assert fake.seen == ["cancelled"]


@pytest.mark.parametrize("version", ["2.51.0", "2.58.0", ""])
async def test_abandoned_call_is_drained_on_old_servers(version: str) -> None:
    async with serving(FakeGrpcServer(version)) as (fake, triton):
        await ask_and_disconnect(fake, triton)
        await triton.version()  # a round trip, in which a cancellation would have come too
        fake.released.set()
        await fake.ended.wait()
        assert fake.seen == ["answered"]


async def test_abandoned_calls_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "MAX_ABANDONED_CALLS", 1)
    async with serving(FakeGrpcServer("2.51.0")) as (fake, triton):
        await ask_and_disconnect(fake, triton)
        await triton.version()
        with pytest.raises(
            ApiError, match="1 requests of embeds, whose clients disconnected, are still running"
        ) as refused:
            await triton.infer(REQUEST)
        fake.released.set()
        while triton.abandoned.tasks:
            await asyncio.wait(triton.abandoned.tasks)
        await triton.infer(REQUEST)
        assert refused.value.status == 429


async def test_abandoned_call_stops_counting_after_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count a call whose process died only until the timeout, or later requests would be refused for ever."""
    monkeypatch.setattr(pending_calls, "MAX_ABANDONED_CALLS", 1)
    monkeypatch.setattr(pending_calls, "ABANDONED_TIMEOUT_S", 0.05)
    async with serving(FakeGrpcServer("2.51.0")) as (fake, triton):
        await ask_and_disconnect(fake, triton)
        async with asyncio.timeout(60):
            while triton.abandoned.tasks:
                await asyncio.wait(triton.abandoned.tasks)
            await fake.ended.wait()
        fake.released.set()
        await triton.infer(REQUEST)
        assert fake.seen == ["cancelled", "answered"]


class FakeDying(FakeGrpcServer):
    """Server whose process dies of the first `deaths` requests: after each, its model is not ready at one look.

    The requests are answered if it only `drains`: an unloaded version first answers the requests that it has.
    """

    def __init__(self, deaths: int, drains: bool = False) -> None:
        super().__init__("2.59.0")
        self.ready, self.deaths, self.drains, self.asked = False, deaths, drains, 0

    async def ModelReady(
        self, request: service_pb2.ModelReadyRequest, context: grpc.aio.ServicerContext
    ) -> service_pb2.ModelReadyResponse:
        answer = await super().ModelReady(request, context)
        if self.ready and self.drains:
            self.released.set()
        self.ready = True
        return answer

    async def ModelInfer(
        self, request: service_pb2.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> service_pb2.ModelInferResponse:
        self.asked += 1
        if self.asked > self.deaths:
            return service_pb2.ModelInferResponse()
        self.ready = False
        return await super().ModelInfer(request, context)


@pytest.mark.parametrize(("drains", "lost_s", "asked"), [(True, 3600.0, 1), (False, 0.1, 2)])
async def test_lost_call_is_retried_once(
    drains: bool, lost_s: float, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process died and started again: that alone does not show that a call is lost."""
    monkeypatch.setattr(pending_calls, "READY_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(pending_calls, "LOST_AFTER_S", lost_s)
    async with serving(FakeDying(1, drains)) as (fake, triton), asyncio.timeout(60):
        await triton.infer(REQUEST)
        assert isinstance(fake, FakeDying)
        assert fake.asked == asked


async def test_slow_call_of_a_ready_model_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "READY_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(pending_calls, "LOST_AFTER_S", 0.0)
    async with serving(FakeGrpcServer("2.59.0")) as (fake, triton), asyncio.timeout(60):
        asking = asyncio.ensure_future(triton.infer(REQUEST))
        while len(fake.looks) < 5:
            await asyncio.sleep(0.01)
        fake.released.set()
        await asking
        assert set(fake.looks) == {"embeds: True"}
        assert fake.seen == ["answered"]


async def test_call_lost_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "READY_CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(pending_calls, "LOST_AFTER_S", 0.05)
    async with serving(FakeDying(triton_module.ATTEMPTS)) as (_, triton), asyncio.timeout(60):
        with pytest.raises(ApiError, match=r"its process may have died\. Send it again later") as error:
            await triton.infer(REQUEST)
        assert error.value.status == 503


async def test_closing_gateway_waits_for_abandoned_calls() -> None:
    async with serving(FakeGrpcServer("2.51.0")) as (fake, triton):
        await ask_and_disconnect(fake, triton)
        closing = asyncio.ensure_future(triton.close())
        await asyncio.sleep(0)
        fake.released.set()
        await closing
    assert fake.seen == ["answered"]
