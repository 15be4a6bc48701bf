"""A gateway that loads models on demand over a stand-in for Triton."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from builder.serving.gateway.access_log import AccessLog
from builder.serving.gateway.residency.backend import OnDemandBackend, make_on_demand_app
from builder.serving.gateway.residency.memory_budget import SERVER_BYTES
from builder.serving.gateway.settings import GatewaySettings, OnDemandSettings
from builder.serving.plan.lines import PROCESS
from tests.serving.gateway.asgi import Answer, ask
from tests.serving.gateway.fake_control import SIZE, FakeServer

ONE = PROCESS + SIZE

NOWHERE = "127.0.0.1:1"  # no process listens there: the memory of models is estimated


class Case:
    """A gateway over a FakeServer with memory for that many models."""

    def __init__(self, repository: Path, room: float = 3, pins: tuple[str, ...] = (), **settings: Any) -> None:
        self.triton = FakeServer(repository)
        options = OnDemandSettings(repository, SERVER_BYTES + int(room * ONE), pins, settings.pop("verify_key", None))
        parts = make_on_demand_app(GatewaySettings(triton=NOWHERE, **settings), options, self.triton, None)
        self.app: AccessLog = parts[0]
        self.backend: OnDemandBackend = parts[1]
        taken = self.backend.residents.budget
        taken.now = lambda: 0.0  # loads take no time, and a model may go as soon as it has answered

    async def embed(self, name: str, text: str = "text", **options: Any) -> Answer:
        return await ask(self.app, "/v1/embeddings", {"model": name, "input": text}, **options)

    async def write(self, name: str, tokens: int = 3, **options: Any) -> Answer:
        body = {"model": name, "prompt": "Once", "max_tokens": tokens, "stream": True}
        return await ask(self.app, "/v1/completions", body, **options)

    @property
    def leases(self) -> int:
        return sum(resident.leases for resident in self.backend.residents.models.values())

    @property
    def waiting(self) -> int:
        return sum(resident.waiting for resident in self.backend.residents.models.values())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.001)
