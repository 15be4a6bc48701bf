"""Keep the state of one Triton of a fleet: its readiness, its models, its running work, and its failures."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import TypeVar

from builder.serving.gateway.backend import Backend
from builder.serving.gateway.errors import ApiError, ServerUnreachable
from builder.serving.gateway.fleet.health import Health
from builder.serving.gateway.fleet.holders import ModelHolders
from builder.serving.gateway.fleet.request_work import RequestWork
from builder.serving.gateway.fleet.slowness import SlownessMeter
from builder.serving.gateway.triton import Triton

CHECK_TIMEOUT_S = 2.0
MISSED_CHECKS = 3  # in a row, after which a server is not ready; a busy one may miss one
SERVER_FAULTS = (500, 503)  # statuses of an answer that may be the fault of the server rather than of the request
T = TypeVar("T")


class RunningWork:
    """Work of a running request that is not answered yet."""

    def __init__(self, server: FleetServer, work: RequestWork) -> None:
        self.server, self.prompt, self.answer = server, work.prompt, work.answer

    def advance(self, tokens: int) -> None:
        """Record a piece of the answer: the prompt is read, and about `tokens` less are left."""
        written = min(tokens, self.answer)
        self.server.work -= self.prompt + written
        self.prompt, self.answer = 0, self.answer - written


class FleetServer:
    """One Triton, at the address `name`. Readiness is what its last check said; requests say whether it works.

    `backend`: takes its requests; None for the Triton itself. `versions`: the loaded versions of each model.
    `repository`: its models, loaded or not. `model_health`: the health of each model on it.
    """

    def __init__(
        self, name: str, triton: Triton, holders: ModelHolders[FleetServer], backend: Backend | None = None
    ) -> None:
        self.name, self.triton, self.holders = name, triton, holders
        self.backend = triton if backend is None else backend
        self.work = 0  # tokens
        self.requests = 0
        self.loaded: list[tuple[str, str]] = []  # models and versions, as the server listed them last
        self.versions: Mapping[str, Sequence[str]] = {}
        self.repository: Set[str] = frozenset()
        self.is_ready = False
        self.is_leaving = False  # its address is gone: it only finishes running requests
        self.missed_checks = 0
        self.is_checking = False
        self.slowness_meter = SlownessMeter()
        self.health = Health()
        self.model_health: defaultdict[str, Health] = defaultdict(Health)

    @property
    def accepts_requests(self) -> bool:
        return self.is_ready and not self.is_leaving

    @property
    def has_drained(self) -> bool:
        """Return True if it left and nothing needs it any more."""
        return self.is_leaving and not self.requests

    @property
    def slowness(self) -> float:
        return self.slowness_meter.slowness

    def has_loaded(self, model: str) -> bool:
        return model in self.versions

    def is_healthy(self, model: str, now: float) -> bool:
        """Return True unless requests failed, to the server or to this model on it."""
        model_health = self.model_health.get(model)
        return not (self.health.is_ejected(now) or (model_health is not None and model_health.is_ejected(now)))

    def state(self, now: float) -> str:
        """Return why it takes no requests, for messages; "ready" if it does."""
        if self.is_leaving:
            return "draining"
        if self.health.is_ejected(now):
            return f"ejected for {self.health.backoff.due - now:.0f} s"
        return "ready" if self.is_ready else "not ready"

    @contextmanager
    def running(self, work: RequestWork) -> Iterator[RunningWork]:
        """Count a request while it runs."""
        running = RunningWork(self, work)
        self.work += running.prompt + running.answer
        self.requests += 1
        try:
            yield running
        finally:
            self.work -= running.prompt + running.answer
            self.requests -= 1

    def record_success(self, model: str) -> None:
        self.health.record_success()
        self.model_health[model].record_success()

    def record_failure(self, model: str, error: ApiError, now: float) -> bool:
        """Record a failed request. Return True if it ejects the server or the model on it.

        A server that is ejected has to pass a check before it returns.
        """
        if isinstance(error, ServerUnreachable):
            if self.health.record_failure(now):
                self.is_ready = False
                return True
            return False
        return error.status in SERVER_FAULTS and self.model_health[model].record_failure(now)

    async def check(self) -> None:
        """Ask if the server is ready and, if so, what it has loaded. It keeps its state if it misses a few checks."""
        self.is_checking = True
        self.slowness_meter.forget()
        try:
            is_ready = await self._in_time(self.reports_ready())
            if is_ready:
                await self.read_versions()
            if is_ready and not self.is_ready:
                self.slowness_meter = SlownessMeter()  # late answers to earlier requests say nothing of its speed
            self.is_ready, self.missed_checks = is_ready, 0
        except ApiError:
            self.missed_checks += 1
            if self.missed_checks >= MISSED_CHECKS:
                self.is_ready = False
        finally:
            self.is_checking = False

    async def reports_ready(self) -> bool:
        """Return what the server says of itself. Raises ApiError if it does not answer."""
        return await self.triton.reports_ready()

    async def close(self, grace_s: float = 0.0) -> None:
        """Close the connection, after `grace_s` at most for running calls."""
        await self.triton.close(grace_s)

    async def read_versions(self) -> None:
        """Read which models are loaded, and tell `holders`. Raises ApiError."""
        loaded = await self._in_time(self.triton.index())
        if self.is_leaving or loaded == self.loaded:
            return
        versions: dict[str, list[str]] = {}
        for name, version in loaded:
            versions.setdefault(name, []).append(version)
        self.holders.change(self, self.versions, versions)
        self.loaded, self.versions = loaded, versions

    async def read_repository(self) -> None:
        """Read which models its repository has. Raises ApiError."""
        self.repository = await self._in_time(self.triton.repository_models())

    async def _in_time(self, answer: Awaitable[T]) -> T:
        """Return an answer that needs no inference. Raises ApiError 504 after CHECK_TIMEOUT_S."""
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await answer
        except TimeoutError as error:
            message = f"Triton at {self.name} does not answer within {CHECK_TIMEOUT_S:g} s"
            raise ApiError(504, message, code="timeout") from error
