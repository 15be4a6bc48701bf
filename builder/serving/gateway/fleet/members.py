"""Follow the servers of a fleet: resolve names, check health, and let servers that leave finish their requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.fleet.fleet_server import FleetServer
from builder.serving.gateway.fleet.holders import ModelHolders
from builder.serving.gateway.fleet.metrics import FleetMetrics
from builder.serving.gateway.fleet.targets import Target, resolve
from builder.serving.gateway.triton import Triton

CHECK_INTERVAL_S = 1.0
CHECKS_PER_RESOLUTION = 5
log = logging.getLogger(__name__)


class FleetMembers:
    """Servers by address. `watch` has to run while they are used; call `update` once before."""

    def __init__(
        self, targets: Sequence[Target], metrics: FleetMetrics, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.targets, self.metrics, self.now = targets, metrics, now
        self.servers: dict[str, FleetServer] = {}
        self.holders = ModelHolders[FleetServer]()

    def accepting(self) -> list[FleetServer]:
        """Return the servers that take new requests, healthy or not."""
        return [server for server in self.servers.values() if server.accepts_requests]

    def accepting_with(self, model: str) -> list[FleetServer]:
        """Return the servers that take new requests and have a model loaded. Looks at no other server."""
        return [server for server in self.holders.of(model) if server.accepts_requests]

    def describe(self) -> str:
        """Return the state of every server, for messages."""
        now = self.now()
        return ", ".join(f"{server.name} ({server.state(now)})" for server in self.servers.values()) or "no addresses"

    async def update(self) -> None:
        """Resolve the targets and check every server. Keeps the known servers if a name is not resolved."""
        try:
            await self._follow(await resolve(self.targets))
        except OSError as error:
            log.warning("the servers are those known before, since a name is not resolved: %s", error)
        await self.check()

    async def watch(self) -> None:
        """Check the servers every CHECK_INTERVAL_S, and resolve their names less often."""
        while True:
            for _ in range(CHECKS_PER_RESOLUTION):
                await asyncio.sleep(CHECK_INTERVAL_S)
                await self.check()
            await self.update()

    async def check(self) -> None:
        """Check all servers, and log which became ready or unready."""
        servers = list(self.servers.values())
        before = [server.is_ready for server in servers]
        await asyncio.gather(*(server.check() for server in servers))
        for server, was_ready in zip(servers, before, strict=True):
            if server.is_ready != was_ready:
                log.warning("Triton at %s is %s", server.name, "ready" if server.is_ready else "not ready")

    async def read_versions(self) -> None:
        """Read what the servers have loaded now. Raises ApiError if none answers."""
        servers = self.accepting()
        errors = await asyncio.gather(*map(_read_versions, servers))
        if all(errors):
            raise next(iter(errors), None) or self.unavailable()

    def unavailable(self) -> ApiError:
        """Return the error for a fleet without a server that takes requests."""
        return ApiError(503, f"no Triton takes requests: {self.describe()}", code="unavailable", retry_after=2)

    async def close(self) -> None:
        await asyncio.gather(*(server.triton.close() for server in self.servers.values()))

    async def _follow(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            if address not in self.servers:
                self.servers[address] = FleetServer(address, Triton(address), self.holders)
                self.metrics.add(self.servers[address])
        for server in list(self.servers.values()):
            server.is_leaving = server.name not in addresses
            if server.is_leaving and not server.requests:
                del self.servers[server.name]
                self.holders.change(server, server.versions, {})
                self.metrics.remove(server)
                await server.triton.close()


async def _read_versions(server: FleetServer) -> ApiError | None:
    try:
        await server.read_versions()
    except ApiError as error:
        return error
    return None
