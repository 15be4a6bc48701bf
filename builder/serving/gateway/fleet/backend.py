"""Send each request to one of several Tritons, and to another if that one fails before its first answer."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from random import Random

from tritonclient.grpc import service_pb2

from builder.serving.gateway.backend import Backend, Metadata, StreamFunction, as_stream
from builder.serving.gateway.errors import ApiError, unavailable
from builder.serving.gateway.fleet.fleet_server import FleetServer
from builder.serving.gateway.fleet.hedging import AnswerTimes
from builder.serving.gateway.fleet.members import FleetMembers
from builder.serving.gateway.fleet.request_work import RequestWork, answer_tokens, encoding_work, generation_work
from builder.serving.gateway.fleet.retry_budget import RetryBudget
from builder.serving.gateway.fleet.routing import by_prefix, least_loaded
from builder.serving.gateway.fleet.slowness import MAX_RATIO, SlownessMeter
from builder.serving.gateway.fleet.versions import holders_of
from builder.serving.gateway.tensors import Outputs

# Errors of a request that another server may answer: this one does not answer, lacks the model, or has a full queue.
RETRYABLE = ("unavailable", "queue_full")
MAX_ATTEMPTS = 3  # servers that a request is sent to, since it may be what makes them fail
log = logging.getLogger(__name__)


class LoadedElsewhere(Exception):
    """Say that another server has loaded the model of a request that waits for a load, and is to answer it."""


@dataclass
class Attempts:
    """Servers that failed to answer one request.

    `requested`: the version that the client named; `version`: the one that they were asked for. Both may be empty.
    `error`: that of the last server; `limit`: servers that it is sent to; `asked`: the one that is to answer now;
    `second`: those of the call to a second server, if there is one; `is_overtaken`: that one has answered first.
    """

    requested: str
    version: str = ""
    tried: list[FleetServer] = field(default_factory=list)
    error: ApiError | None = None
    limit: int = MAX_ATTEMPTS
    asked: FleetServer | None = None
    second: Attempts | None = None
    is_overtaken: bool = False

    @property
    def excluded(self) -> list[FleetServer]:
        """Return the servers that the request is not sent to again."""
        second = None if self.second is None else self.second.asked
        return self.tried if second is None else [*self.tried, second]

    def add(self, server: FleetServer, version: str, error: ApiError) -> None:
        self.tried.append(server)
        self.version, self.error = version, error


class FleetBackend(Backend):
    """Backend over the Tritons of `members`.

    A request goes to a server that has its model loaded, in one version while it lasts: prompts that begin alike to the
    same server, and other requests to the one with the least work.
    """

    retryable: Sequence[str] = RETRYABLE

    def __init__(self, members: FleetMembers, random: Random | None = None) -> None:
        self.members, self.random = members, random or Random()
        self.budget = RetryBudget()

    async def ready(self) -> bool:
        """Return True if at least one server takes requests."""
        return bool(self.members.accepting())

    async def infer(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> Outputs:
        work, attempts = encoding_work(request), Attempts(request.model_version)
        self.budget.add_request(self.members.now())
        times = self.members.answer_times
        if times is None:
            return await self._infer(request, metadata, work, attempts)
        return await self._infer_hedged(request, metadata, work, attempts, times)

    def stream(self, request: service_pb2.ModelInferRequest, metadata: Metadata = ()) -> AsyncGenerator[Outputs, None]:
        self.budget.add_request(self.members.now())
        attempts = Attempts(request.model_version)
        return self._answers(request, metadata, generation_work(request), attempts, _send_stream)

    async def _infer(
        self, request: service_pb2.ModelInferRequest, metadata: Metadata, work: RequestWork, attempts: Attempts
    ) -> Outputs:
        async with aclosing(self._answers(request, metadata, work, attempts, _send_once)) as answers:
            return await anext(answers)

    async def _infer_hedged(
        self,
        request: service_pb2.ModelInferRequest,
        metadata: Metadata,
        work: RequestWork,
        attempts: Attempts,
        times: AnswerTimes,
    ) -> Outputs:
        """Return the first answer of a server and, where it takes unusually long, of a second one."""
        model, began = request.model_name, self.members.now()
        after_s = times.hedge_after_s(model, work.tokens)
        calls = [asyncio.ensure_future(self._infer(request, metadata, work, attempts))]
        try:
            await asyncio.wait(calls, timeout=None if after_s == math.inf else after_s)
            if not calls[0].done() and (asked := attempts.asked) is not None:
                second = Attempts(attempts.requested, request.model_version, [*attempts.tried, asked], limit=1)
                if self._may_hedge(model, second):
                    copy = service_pb2.ModelInferRequest()
                    copy.CopyFrom(request)
                    copy.model_version = attempts.requested
                    attempts.second = second
                    calls.append(asyncio.ensure_future(self._infer(copy, metadata, work, second)))
                    self.members.metrics.hedges.labels(asked.name).inc()
            answered = await _first_success(calls)
            attempts.is_overtaken = answered is not calls[0]
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        outputs = answered.result()
        if attempts.is_overtaken:
            self.members.metrics.hedge_wins.inc()
        times.record(model, work.tokens, self.members.now() - began)
        return outputs

    def _may_hedge(self, model: str, second: Attempts) -> bool:
        """Return True if a server that was not asked has loaded the version, and the budget allows to ask it."""
        now, version = self.members.now(), second.version
        others = [other for other in self.members.accepting_with(model) if other not in second.tried]
        has_other = any(
            other.has_loaded(model)
            and other.is_healthy(model, now)
            and (not version or version in other.versions.get(model, ()))
            for other in others
        )
        return has_other and self._take_retry()

    async def _answers(
        self,
        request: service_pb2.ModelInferRequest,
        metadata: Metadata,
        work: RequestWork,
        attempts: Attempts,
        send_to: Callable[[FleetServer], StreamFunction],
    ) -> AsyncGenerator[Outputs, None]:
        """Yield the answers of one server. A request whose answer has started is not sent again."""
        model = request.model_name
        version, holders = await self._candidates(model, attempts)
        if not holders:
            raise self._not_loaded(model, version)
        while True:
            server, has_started = self._choose(model, holders, work), False
            meter = server.slowness_meter if server.has_loaded(model) else None
            sent = self.members.now()
            request.model_version, attempts.asked = version, server
            try:
                with server.running(work) as running:
                    async with aclosing(self._sender(server, model, attempts, send_to)(request, metadata)) as answers:
                        async for outputs in answers:
                            if not has_started:
                                has_started = True
                                server.record_success(model)
                                self._record_time(meter, model, version, work, sent)
                            running.advance(answer_tokens(outputs))
                            yield outputs
                return
            except asyncio.CancelledError:
                if attempts.is_overtaken:  # or a slow server would keep getting requests
                    self._record_time(meter, model, version, work, sent)
                raise
            except LoadedElsewhere:
                version, holders = await self._candidates(model, attempts)
                if not holders:
                    raise self._not_loaded(model, version) from None
            except ApiError as error:
                self._record_failure(server, model, error)
                if error.code == "queue_full" and meter is not None:
                    meter.record(MAX_RATIO)  # others keep it busy, and none of its work is counted here
                attempts.add(server, version, error)
                if has_started or len(attempts.tried) >= attempts.limit or error.code not in self.retryable:
                    raise
                version, holders = await self._candidates(model, attempts)
                if not holders or not self._may_retry(model, error, holders):
                    raise
                self.members.metrics.retries.labels(server.name).inc()
            finally:
                request.model_version = attempts.requested  # a canary sends the same request to another model

    async def _candidates(self, model: str, attempts: Attempts) -> tuple[str, list[FleetServer]]:
        """Return the version of `model` to ask for and the servers that may answer, without those already tried."""
        servers = [server for server in self.members.accepting_with(model) if server not in attempts.excluded]
        return holders_of(servers, model, attempts.requested, attempts.version)

    def _choose(self, model: str, holders: Sequence[FleetServer], work: RequestWork) -> FleetServer:
        """Return a server to send a request to. If the model fails on all of them, the fault may not be theirs."""
        now = self.members.now()
        servers = [server for server in holders if server.is_healthy(model, now)] or holders
        if work.prefix:
            return by_prefix(work.prefix, work.tokens, servers)
        return least_loaded(work.tokens, servers, self.random)

    def _sender(
        self, server: FleetServer, model: str, attempts: Attempts, send_to: Callable[[FleetServer], StreamFunction]
    ) -> StreamFunction:
        """Return the function that sends a request to a server."""
        return send_to(server)

    def _record_time(
        self, meter: SlownessMeter | None, model: str, version: str, work: RequestWork, sent: float
    ) -> None:
        """Record the time from `sent` until now as that of a server's first answer; without its meter, nothing."""
        if meter is not None:
            kind, seconds = (version, work.streams), self.members.now() - sent
            meter.record(self.members.usual_paces.ratio(model, kind, work.until_first_answer, seconds))

    def _record_failure(self, server: FleetServer, model: str, error: ApiError) -> None:
        if server.record_failure(model, error, self.members.now()):
            self.members.metrics.ejections.labels(server.name).inc()
            log.warning("Triton at %s gets no requests for a while, since %s failed: %s", server.name, model, error)

    def _may_retry(self, model: str, error: ApiError, holders: Sequence[FleetServer]) -> bool:
        """Return True if the budget allows to ask one of `holders` after an error."""
        return self._take_retry()

    def _take_retry(self) -> bool:
        is_allowed = self.budget.take_retry(self.members.now())
        if not is_allowed:
            self.members.metrics.refused_retries.inc()
        return is_allowed

    def _not_loaded(self, model: str, version: str) -> ApiError:
        """Return the error for a model, or a version of it, that no server has loaded."""
        if not self.members.accepting():
            return self.members.unavailable()
        what = f"version {version} of {model}" if version else model
        return unavailable(f"no Triton that takes requests has {what} loaded: {self.members.describe()}")


async def _first_success(calls: Sequence[asyncio.Future[Outputs]]) -> asyncio.Future[Outputs]:
    """Return the first call that succeeds; the first one if all fail."""
    running = set(calls)
    while running:
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for call in calls:
            if call in done and not call.exception():
                return call
    return calls[0]


def _send_once(server: FleetServer) -> StreamFunction:
    return as_stream(server.backend.infer)


def _send_stream(server: FleetServer) -> StreamFunction:
    return server.backend.stream
