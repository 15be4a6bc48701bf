"""A gateway over several Tritons: routing, failures, draining and versions, over real gRPC."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from tritonclient.grpc import service_pb2

from builder.runtime.fields import Field
from builder.serving.gateway.app import make_app
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.fleet import members as members_module
from builder.serving.gateway.fleet.backend import MAX_ATTEMPTS, FleetBackend
from builder.serving.gateway.fleet.catalogue import FleetCatalogue
from builder.serving.gateway.fleet.hedging import MIN_ANSWERS, AnswerTimes
from builder.serving.gateway.fleet.targets import Target
from builder.serving.gateway.settings import GatewaySettings
from builder.serving.gateway.tensors import LENGTH, Output, add_tensor
from tests.serving.gateway.asgi import Answer, ask
from tests.serving.gateway.fleet.servers import Fleet, FleetTriton, fleet
from tests.serving.gateway.on_demand import until
from tests.serving.gateway.requests import CHAT

EMBEDDING = {"model": "embeds", "input": "abc"}
TOKENS = 4  # about as many as it has


async def embed(running: Fleet, text: str = "abc") -> Answer:
    return await ask(running.app, "/v1/embeddings", {**EMBEDDING, "input": text})


async def test_every_server_of_a_list_answers() -> None:
    """Regression: a list was passed to gRPC as one name, and every request failed."""
    async with fleet(FleetTriton(), FleetTriton()) as running:
        answers = [await embed(running) for _ in range(40)]
        assert {answer.status for answer in answers} == {200}
        counts = [len(triton.answered) for triton in running.tritons]
        assert sum(counts) == 40
        assert min(counts) > 5, "chance decides between idle servers"


async def test_models_of_all_servers_are_listed() -> None:
    async with fleet(
        FleetTriton({"embeds": ("1",), "writes": ("1",)}), FleetTriton({"ranks": ("1",), "writes": ("1",)})
    ) as running:
        models = (await ask(running.app, "/v1/models")).json["data"]
        assert [model["id"] for model in models] == ["embeds", "ranks", "writes"]
        assert (await embed(running)).status == 200
        assert running.tritons[1].requests == []
        assert (await ask(running.app, "/v1/models/none")).status == 404


async def test_requests_avoid_a_slow_server() -> None:
    async with fleet(FleetTriton(delay_s=0.1), FleetTriton(delay_s=0.01), now=time.monotonic) as running:

        async def client() -> None:
            for _ in range(10):
                assert (await embed(running)).status == 200

        await asyncio.gather(*(client() for _ in range(8)))
        slow, fast = (len(triton.answered) for triton in running.tritons)
        assert slow < fast / 2, (slow, fast)


async def test_killed_server_fails_no_request() -> None:
    """Its running requests are sent to another server, and it gets no more until it has passed a check."""
    async with fleet(FleetTriton(), FleetTriton(), now=time.monotonic) as running:
        running.tritons[0].open.clear()
        asking = [asyncio.ensure_future(embed(running)) for _ in range(30)]
        while not running.tritons[0].requests or len(running.tritons[1].answered) < 10:
            await asyncio.sleep(0.01)
        await running.kill(0)
        assert {answer.status for answer in await asyncio.gather(*asking)} == {200}
        for _ in range(10):
            assert (await embed(running)).status == 200
        seen = len(running.tritons[0].requests)
        running.tritons[0].open.set()
        await running.start(0)
        server = running.members.servers[running.addresses[0]]
        assert not server.accepts_requests, "it was ejected and not checked since"
        while not (server.accepts_requests and server.is_healthy("embeds", running.members.now())):
            await running.members.check()
            await asyncio.sleep(0.05)
        await asyncio.gather(*(embed(running) for _ in range(20)))
        assert len(running.tritons[0].requests) > seen
        text = (await ask(running.app, "/metrics")).pieces[0].decode()
        assert f'server_ejections_total{{server="{running.addresses[0]}"}} 1.0' in text
        assert f'server_requests{{server="{running.addresses[0]}"}} 0.0' in text


def hedging(running: Fleet, after_s: float) -> FleetBackend:
    """Let requests of the first server go to another one `after_s` later."""
    backend, times = FleetBackend(running.members), AnswerTimes(50)
    running.members.answer_times = times
    running.app = make_app(GatewaySettings(), backend, None, models=running.models)
    for _ in range(MIN_ANSWERS):
        times.record("embeds", TOKENS, after_s)
    for name in running.addresses[1:]:
        running.members.servers[name].work += 100_000
    return backend


async def test_request_that_takes_long_is_sent_to_a_second_server() -> None:
    async with fleet(FleetTriton(), FleetTriton(), now=time.monotonic) as running:
        (slow, other), (name, _) = running.tritons, running.addresses
        backend = hedging(running, 0.01)
        slow.open.clear()
        hedges = running.members.metrics.hedges.labels(name)._value
        before, seen = hedges.get(), len(other.answered)
        assert (await embed(running)).status == 200
        assert (hedges.get(), len(other.answered)) == (before + 1, seen + 1)
        assert running.members.metrics.hedge_wins._value.get() > 0
        assert running.members.servers[name].requests == 0, "the other call was cancelled"

        backend.budget.left = -1000.0
        waiting = asyncio.ensure_future(embed(running))
        await until(lambda: running.members.metrics.refused_retries._value.get() == 1)
        stream = asyncio.ensure_future(ask(running.app, "/v1/chat/completions", {**CHAT, "stream": True}))
        await until(lambda: ("writes", "1") in slow.requests)
        slow.open.set()
        assert (await waiting).status == 200
        assert (await stream).events[-1] == "[DONE]"
        assert len(other.answered) == seen + 1, "neither without a budget nor for streams"


async def test_server_that_loses_to_a_second_one_counts_as_slow() -> None:
    """Regression: its call was cancelled before it was timed, so it kept getting requests."""
    async with fleet(FleetTriton(), FleetTriton(), now=time.monotonic) as running:
        hedging(running, 0.0)
        for _ in range(20):
            running.members.usual_paces.ratio("embeds", ("1", False), TOKENS, 1e-6)
        running.tritons[0].open.clear()
        assert (await embed(running)).status == 200
        assert running.members.servers[running.addresses[0]].slowness > 1


async def test_failures_are_no_answers_to_hedge_by() -> None:
    """Regression: after requests that failed at once, all others took unusually long."""
    async with fleet(FleetTriton(), FleetTriton()) as running:
        hedging(running, 1.0)
        times = running.members.answer_times
        assert times is not None
        for triton in running.tritons:
            triton.error = ApiError(500, "Internal: division by zero")
        for _ in range(MIN_ANSWERS + 1):
            assert (await embed(running)).status == 500
        assert times.hedge_after_s("embeds", TOKENS) == 1.0


async def test_second_server_answers_in_the_same_version() -> None:
    """Regression: it was asked for another version, which a fleet that is updated does not serve yet."""
    async with fleet(FleetTriton({"embeds": ("2",)}), FleetTriton({"embeds": ("1",)})) as running:
        hedging(running, 0.0)
        slow, other = running.tritons
        slow.open.clear()
        asking = asyncio.ensure_future(embed(running))
        await until(lambda: bool(slow.requests))
        slow.open.set()
        assert (await asking).status == 200
        assert not other.requests


async def test_second_server_is_none_that_just_failed() -> None:
    """Regression: a retry that took long was sent to the server that had failed to answer the same request."""
    async with fleet(FleetTriton(), FleetTriton()) as running:
        hedging(running, 0.05)
        failing, slow = running.tritons
        failing.error = ApiError(503, "Socket closed")
        slow.open.clear()
        asking = asyncio.ensure_future(embed(running))
        await until(lambda: bool(slow.requests))
        await asyncio.sleep(0.1)
        slow.open.set()
        assert (await asking).status == 200
        assert len(failing.requests) == 1


async def test_retry_goes_to_no_server_that_the_second_request_was_sent_to() -> None:
    """Regression: if the first server failed after that, the retry could be sent to the second one once more."""
    async with fleet(FleetTriton(), FleetTriton(), FleetTriton()) as running:
        hedging(running, 0.0)
        first, second, third = running.tritons
        running.members.servers[running.addresses[2]].work += 1_000_000  # so that it is chosen last
        first.open.clear()
        second.open.clear()
        asking = asyncio.ensure_future(embed(running))
        await until(lambda: bool(second.requests))
        first.error = ApiError(503, "Socket closed")
        first.open.set()
        await until(lambda: len(second.requests) + len(third.requests) == 2)
        second.open.set()
        assert (await asking).status == 200
        assert [len(triton.requests) for triton in (first, second, third)] == [1, 1, 1]


async def test_stream_moves_before_its_first_piece_only() -> None:
    async with fleet(FleetTriton(), FleetTriton()) as running:
        broken, other = running.tritons
        running.members.servers[running.addresses[1]].work += 1000  # so that the other one is chosen
        broken.broken_after = 0
        answer = await ask(running.app, "/v1/chat/completions", {**CHAT, "stream": True})
        assert answer.events[-1] == "[DONE]"
        assert other.answered == [("writes", "1")]
        broken.broken_after = 1
        answer = await ask(running.app, "/v1/chat/completions", {**CHAT, "stream": True})
        assert answer.events[-1]["error"]["code"] == "unavailable"
        assert len(other.answered) == 1


async def test_work_of_a_server_loses_the_tokens_of_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a piece counted as one token, also one that had those of a whole step."""

    async def pieces(*_: object) -> AsyncIterator[dict[str, Output]]:
        for text in ("a", "museum in the north ", "b" * 1000):
            yield {"text_output": Output("BYTES", (1,), LENGTH.pack(len(text)) + text.encode())}

    async with fleet(FleetTriton()) as running:
        (triton,), (server,) = running.tritons, running.members.servers.values()
        monkeypatch.setattr(triton.fake, "stream", pieces)
        request = service_pb2.ModelInferRequest(model_name="writes")
        add_tensor(request, Field("max_tokens", "TYPE_INT32"), [100], (1,))
        async with aclosing(FleetBackend(running.members).stream(request)) as answers:
            assert [server.work async for _ in answers] == [99, 94, 0]


@pytest.mark.parametrize(
    ("error", "status"),
    [(ApiError(429, "Exceeds maximum queue size"), 200), (ApiError(500, "it is broken"), 500)],
)
async def test_only_failures_of_a_server_are_sent_to_another(error: ApiError, status: int) -> None:
    """A full queue is retried, an error of the model is not: it may be the request's fault."""
    async with fleet(FleetTriton(), FleetTriton()) as running:
        running.members.servers[running.addresses[1]].work += 1000
        running.tritons[0].error = error
        assert (await embed(running)).status == status
        assert len(running.tritons[1].answered) == (status == 200)


async def test_full_server_does_not_attract_requests() -> None:
    """Regression: it refused at once, so it had the least work of all, until the retries were used up."""
    async with fleet(FleetTriton(), FleetTriton()) as running:
        running.tritons[0].error = ApiError(429, "Exceeds maximum queue size")
        statuses = Counter([(await embed(running)).status for _ in range(400)])
        assert statuses == {200: 400}
        assert len(running.tritons[0].requests) < 5


async def test_retries_stop_at_the_budget() -> None:
    async with fleet(FleetTriton(), FleetTriton()) as running:
        for triton in running.tritons:
            triton.error = ApiError(429, "Exceeds maximum queue size")
        answers = [await embed(running) for _ in range(200)]
        assert {answer.status for answer in answers} == {429}
        sent = sum(len(triton.requests) for triton in running.tritons)
        assert sent == 200 + 100 + 40 - 1, "the reserve, and a fifth of the requests, of which the first found it full"


async def test_model_that_fails_on_one_server_is_asked_elsewhere() -> None:
    """Regression: an answer that was late by chance made the other server slow, and the failures came late too."""
    async with fleet(FleetTriton(), FleetTriton()) as running:
        for _ in range(20):
            assert (await embed(running)).status == 200
        running.tritons[0].error = ApiError(500, "it is broken")
        statuses = Counter([(await embed(running)).status for _ in range(40)])
        assert statuses[500] == 3
        assert (await ask(running.app, "/predict", {"inputs": "a"})).status in (200, 500), "other models are asked"


async def test_server_that_never_answered_does_not_attract_requests() -> None:
    """Regression: a new server whose model fails at once was never ejected, and had the least work of all."""
    async with fleet(FleetTriton(), FleetTriton()) as running:
        running.tritons[0].error = ApiError(500, "CUDA error: out of memory")
        statuses = Counter([(await embed(running)).status for _ in range(40)])
        assert statuses[500] <= 3


async def test_request_is_sent_to_three_servers_at_most() -> None:
    """Regression: a request that ends the process of its model ended it on every server, one after another."""
    async with fleet(*(FleetTriton() for _ in range(5))) as running:
        for triton in running.tritons:
            triton.error = ApiError(503, "Stub process is not healthy")
        assert (await embed(running)).status == 503
        assert sum(len(triton.requests) for triton in running.tritons) == MAX_ATTEMPTS


async def test_request_is_not_sent_to_a_server_that_left_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: its connection was closed, so that the retry failed with 500."""
    async with fleet(FleetTriton(), FleetTriton()) as running:
        first, second = running.addresses
        running.members.servers[second].work += 1000
        running.tritons[0].open.clear()
        asking = asyncio.ensure_future(embed(running))
        while not running.tritons[0].requests:
            await asyncio.sleep(0.01)

        async def resolve(target: Target) -> list[str]:
            return [first] if target == first else []

        monkeypatch.setattr(members_module, "resolve", resolve)
        await running.members.update()
        assert list(running.members.servers) == [first]
        await running.kill(0)
        answer = await asking
        assert answer.status == 503
        assert answer.error["code"] == "unavailable"


async def test_draining_server_finishes_its_requests() -> None:
    async with fleet(FleetTriton(), FleetTriton()) as running:
        first, second = running.tritons
        first.open.clear()
        asking = asyncio.gather(*(embed(running) for _ in range(6)))
        while len(first.requests) < 3:
            await asyncio.sleep(0.01)
        first.is_ready = False
        await running.members.check()
        seen = len(first.requests)
        for _ in range(10):
            assert (await embed(running)).status == 200
        assert len(first.requests) == seen
        first.open.set()
        assert {answer.status for answer in await asking} == {200}
        second.is_ready = False
        await running.members.check()
        assert (await ask(running.app, "/health/ready")).status == 503
        refused = await embed(running)
        assert refused.status == 503
        assert f"{running.addresses[0]} (not ready)" in refused.error["message"]


async def test_address_that_disappears_is_drained_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fleet(FleetTriton(), FleetTriton()) as running:
        addresses = list(running.addresses)

        async def resolve(target: Target) -> list[str]:
            return [str(target)] if target in addresses else []

        monkeypatch.setattr(members_module, "resolve", resolve)
        running.tritons[0].open.clear()
        asking = asyncio.gather(*(embed(running) for _ in range(6)))
        while not running.tritons[0].requests:
            await asyncio.sleep(0.01)
        leaving = addresses.pop(0)
        await running.members.update()
        assert leaving in running.members.servers
        running.tritons[0].open.set()
        assert {answer.status for answer in await asking} == {200}
        await running.members.update()
        assert list(running.members.servers) == addresses
        assert leaving not in (await ask(running.app, "/metrics")).pieces[0].decode()
        addresses.append(leaving)
        await running.members.update()
        await asyncio.gather(*(embed(running) for _ in range(20)))
        assert len(running.members.accepting()) == 2


async def test_fleet_answers_with_one_version_during_a_rollout() -> None:
    """Answer with the version that most servers have, and with the new one once as many have it."""
    async with fleet(*(FleetTriton({"embeds": ("1",)}) for _ in range(4))) as running:
        versions: list[set[str]] = []
        for number in range(3):
            await running.members.check()
            await asyncio.gather(*(embed(running) for _ in range(12)))
            versions.append({version for t in running.tritons for _, version in t.answered})
            for triton in running.tritons:
                triton.answered.clear()
            running.tritons[number].versions["embeds"] = ("2",)
        assert versions == [{"1"}, {"1"}, {"2"}]


async def test_version_that_is_gone_is_replaced_before_the_answer() -> None:
    """A rollout loses nothing, although what the gateway knows is a second old."""
    async with fleet(*(FleetTriton({"embeds": ("1",)}) for _ in range(2))) as running:
        running.tritons[0].versions["embeds"] = ("2",)
        answers = [await embed(running) for _ in range(10)]
        assert {answer.status for answer in answers} == {200}


async def test_prompts_that_begin_alike_go_to_one_server() -> None:
    used: set[int] = set()
    async with fleet(FleetTriton(), FleetTriton(), FleetTriton()) as running:
        for topic in range(8):
            opening = f"{topic} " * 200
            for turn in range(3):
                body = {**CHAT, "messages": [{"role": "user", "content": f"{opening} {turn}"}]}
                assert (await ask(running.app, "/v1/chat/completions", body)).status == 200
            counts = [len(triton.answered) for triton in running.tritons]
            assert sorted(counts)[-1] == 3, "the three turns of a conversation"
            used.add(counts.index(3))
            for triton in running.tritons:
                triton.answered.clear()
        assert len(used) > 1, "other conversations go elsewhere"


async def test_candidate_has_to_be_loaded_on_every_server() -> None:
    """Otherwise a few servers would answer the share of all."""
    versions = {"embeds": ("1",), "embeds_next": ("2",)}
    async with fleet(*(FleetTriton(versions, candidates={"embeds_next": "embeds"}) for _ in range(2))) as running:
        models = FleetCatalogue(running.members)
        await models.require_candidate("embeds_next", "embeds")
        running.tritons[1].versions.pop("embeds_next")
        await running.members.check()
        with pytest.raises(ApiError) as refused:
            await models.require_candidate("embeds_next", "embeds")
        assert refused.value.status == 409
        assert running.addresses[1] in refused.value.message
