"""Follow the servers of a fleet: resolve names, check health, and let servers that leave finish their requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from builder.common.errors import SpecError
from builder.serving.gateway.background import start_task
from builder.serving.gateway.errors import ApiError, unavailable
from builder.serving.gateway.fleet.fleet_server import FleetServer
from builder.serving.gateway.fleet.hedging import AnswerTimes
from builder.serving.gateway.fleet.holders import ModelHolders
from builder.serving.gateway.fleet.metrics import FleetMetrics
from builder.serving.gateway.fleet.slowness import UsualPaces
from builder.serving.gateway.fleet.targets import AddressFile, Target, resolve
from builder.serving.gateway.triton import TIMEOUT_S, Triton

CHECK_INTERVAL_S = 1.0
RESOLUTION_INTERVAL_S = 5.0
log = logging.getLogger(__name__)


Connect = Callable[[str, ModelHolders[FleetServer]], FleetServer]


def connect_directly(address: str, holders: ModelHolders[FleetServer]) -> FleetServer:
    """Return the server at `address`, which takes requests for the models that it has loaded."""
    return FleetServer(address, Triton(address), holders)


class FleetMembers:
    """Servers by address. `watch` has to run while they are used; call `update` once before.

    `connect`: creates the server at a new address.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        metrics: FleetMetrics,
        now: Callable[[], float] = time.monotonic,
        connect: Connect = connect_directly,
    ) -> None:
        self.targets, self.metrics, self.now, self.connect = targets, metrics, now, connect
        self.servers: dict[str, FleetServer] = {}
        self.joined = 0  # servers so far; a change tells that there are new ones
        self.holders = ModelHolders[FleetServer]()
        self.usual_paces = UsualPaces()
        self.answer_times: AnswerTimes | None = None  # None: no request is sent to two servers
        self.addresses: dict[Target, Sequence[str]] = {}  # of each target, as it was resolved last
        self.background: set[asyncio.Task[None]] = set()  # checks, and servers that are closed

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
        """Resolve the targets and check every server."""
        await self.resolve()
        await self.check()

    async def watch(self) -> None:
        """Check the servers and resolve the targets regularly. A resolver that is slow does not delay the checks."""
        await asyncio.gather(_repeat(self._start_check, CHECK_INTERVAL_S), _repeat(self.resolve, RESOLUTION_INTERVAL_S))

    async def resolve(self) -> None:
        """Add the servers at new addresses, and drain those whose address is gone.

        A target that is not resolved keeps the addresses that it had.
        """
        answers = await asyncio.gather(*map(resolve, self.targets), return_exceptions=True)
        for target, answer in zip(self.targets, answers, strict=True):
            if isinstance(answer, OSError | SpecError):
                log.warning("%s is not resolved and keeps the addresses that it had: %s", target, answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                self.addresses[target] = answer
        addresses = dict.fromkeys(address for found in self.addresses.values() for address in found)
        for address in addresses:
            if address not in self.servers:
                self.servers[address] = self.connect(address, self.holders)
                self.metrics.add(self.servers[address])
                self.joined += 1
        for server in self.servers.values():
            server.is_leaving = server.name not in addresses

    async def check(self) -> None:
        """Remove the drained servers and check all others, but those whose last check still runs."""
        self._remove_drained()
        self._report_requests()
        await asyncio.gather(*(_check(server) for server in self.servers.values() if not server.is_checking))
        for times in (self.usual_paces, self.answer_times):
            if times is not None:
                times.keep_only(self.holders.servers)

    async def _start_check(self) -> None:
        """Start a check without waiting for it, since a server may hang."""
        self._start(_logged(self.check))

    async def read(self, read: Callable[[FleetServer], Awaitable[None]]) -> None:
        """Run `read` on each server that accepts requests. Raises ApiError if all of them fail."""
        errors = await asyncio.gather(*(_error_of(read(server)) for server in self.accepting()))
        if all(errors):
            raise next(iter(errors), None) or self.unavailable()

    def unavailable(self) -> ApiError:
        """Return the error for a fleet without a server that takes requests."""
        return unavailable(f"no Triton takes requests: {self.describe()}")

    async def close(self) -> None:
        """Close the connections of all servers, also of those that left."""
        for task in self.background:
            task.cancel()
        await asyncio.gather(*(server.close() for server in self.servers.values()))

    def _remove_drained(self) -> None:
        """Remove the servers that left and have drained. Their connections are closed in the background."""
        for server in [server for server in self.servers.values() if server.has_drained]:
            del self.servers[server.name]
            self.holders.change(server, server.versions, {})
            self.metrics.remove(server)
            self._start(server.close(TIMEOUT_S))

    def _report_requests(self) -> None:
        """Write the running requests of all servers beside the files that name some of them."""
        requests = {server.name: server.requests for server in self.servers.values()}
        for target in self.targets:
            if isinstance(target, AddressFile):
                with contextlib.suppress(OSError):  # the folder may be read-only, and only the writer needs them
                    target.write_requests(requests)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = start_task(coroutine)
        self.background.add(task)
        task.add_done_callback(self.background.discard)


async def _check(server: FleetServer) -> None:
    """Check a server. Logs that it became ready or unready."""
    was_ready = server.is_ready
    await server.check()
    if server.is_ready != was_ready:
        log.warning("Triton at %s is %s", server.name, "ready" if server.is_ready else "not ready")


async def _repeat(action: Callable[[], Awaitable[None]], interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await _logged(action)


async def _logged(action: Callable[[], Awaitable[None]]) -> None:
    """Run `action`. Logs a defect, so that it does not end the checks and leave the fleet as it is."""
    try:
        await action()
    except Exception:
        log.exception("following the servers failed once")


async def _error_of(answer: Awaitable[None]) -> ApiError | None:
    try:
        await answer
    except ApiError as error:
        return error
    return None
