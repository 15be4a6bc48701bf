"""Unite the models of all servers of a fleet, in the version that the fleet answers with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from builder.serving.gateway.catalogue import Catalogue, ModelIndex
from builder.serving.gateway.errors import ApiError, unavailable
from builder.serving.gateway.fleet.fleet_server import FleetServer
from builder.serving.gateway.fleet.members import FleetMembers
from builder.serving.gateway.fleet.versions import holders_of
from builder.serving.gateway.served_model import ServedModel
from builder.serving.gateway.triton import Triton

ASK_TIMEOUT_S = 3.0  # of a question that another server can answer too
T = TypeVar("T")


class FleetIndex(ModelIndex):
    """Index of a fleet: what its servers have, and what any one of those that have a model says of it."""

    def __init__(self, members: FleetMembers) -> None:
        self.members = members

    async def index(self) -> list[tuple[str, str]]:
        """Return each model that a server has loaded, with the version to ask for. Raises ApiError."""
        await self.members.read(FleetServer.read_versions)
        names = sorted({name for server in self.members.accepting() for name in server.versions})
        return [(name, holders_of(self.members.accepting_with(name), name)[0]) for name in names]

    async def repository_models(self) -> set[str]:
        """Return the models of all repositories, ready or not. Raises ApiError if no server answers.

        A server that does not accept requests counts with the models that it had: they exist, and may return.
        """
        await self.members.read(FleetServer.read_repository)
        servers = self.members.servers.values()
        return set().union(*(server.repository | server.versions.keys() for server in servers))

    async def config(self, name: str, version: str) -> Any:
        """Return the ModelConfig of a model. Raises ApiError."""
        return await self._first(name, version, lambda triton: triton.config(name, version))

    async def hosted(self, front: str) -> str:
        """Return hosted.json of a shared front, which is the same on every server that has the front."""
        return await self._first(front, "", lambda triton: triton.hosted(front))

    async def adapters(self, model: ServedModel) -> list[str]:
        """Return the adapters of a model."""
        return await self._first(model.name, "", lambda triton: triton.adapters(model))

    async def _first(self, name: str, version: str, ask: Callable[[Triton], Awaitable[T]]) -> T:
        """Return the first answer of the servers that have a model loaded. Raises the last one's ApiError.

        Each but the last has ASK_TIMEOUT_S, since a server that hangs may be the first.
        """
        servers = holders_of(self.members.accepting_with(name), name, version)[1]
        for server in servers[:-1]:
            with contextlib.suppress(ApiError, TimeoutError):
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    return await ask(server.triton)
        if not servers:
            raise unavailable(f"no Triton that takes requests has {name} loaded")
        return await ask(servers[-1].triton)


class FleetCatalogue(Catalogue):
    """Models of a fleet. A candidate has to be loaded wherever its model is, or only some servers would answer."""

    def __init__(self, members: FleetMembers) -> None:
        super().__init__(FleetIndex(members))
        self.members = members

    async def require_candidate(self, name: str, of: str) -> None:
        """Raise ApiError unless the candidate `name` is loaded on every server that has the model `of`."""
        await super().require_candidate(name, of)
        lacking = [server.name for server in self.members.accepting_with(of) if name not in server.versions]
        if lacking:
            message = f"{name} is not loaded on {', '.join(lacking)}; load it on every Triton that has {of}"
            raise ApiError(409, message, param="candidate")
