"""Run the gateway's process: uvicorn, which drains running requests before it stops.

uvicorn only limits how long a connection may be idle after an answer. `Protocol` also limits the time to receive a
request: a connection that sends none, half of its headers or half of its body would stay open forever.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from builder.common.addresses import address_family
from builder.common.errors import ServeError
from builder.serving.gateway.access_log import AccessLog
from builder.serving.gateway.app import make_app
from builder.serving.gateway.catalogue import Catalogue
from builder.serving.gateway.fleet.app import fleet_app
from builder.serving.gateway.fleet.targets import is_fleet
from builder.serving.gateway.limits import RateLimits, rate_limits
from builder.serving.gateway.residency.backend import make_on_demand_app
from builder.serving.gateway.settings import GatewaySettings
from builder.serving.gateway.triton import Triton

REQUEST_TIMEOUT_S = 60.0  # from the connection, or the first byte of a later request, to the last byte of the request
KEEP_ALIVE_S = 75  # longer than clients and load balancers keep an idle connection


class Protocol(HttpToolsProtocol):
    """HTTP protocol that closes a connection whose next request is not complete in time."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._expect()  # the data may not be a request, such as empty lines
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._expect()  # the data before it may have ended another request
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._arrived()
        super().on_message_complete()

    def _expect(self) -> None:
        """Start the timer unless it is already running."""
        if self._late is None:
            self._late = self.loop.call_later(REQUEST_TIMEOUT_S, self._close)

    def _arrived(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _close(self) -> None:
        """Close the connection; if an earlier request is still being answered, check again later."""
        self._late = None
        answering = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if self.pipeline or answering:
            self._expect()
        elif not self.transport.is_closing():
            self.transport.close()


class GatewayServer(uvicorn.Server):
    """Server that drains on the first stop signal and ends at once on the second.

    While draining it refuses new requests and ends when the running ones are answered.
    """

    def __init__(self, config: uvicorn.Config, app: AccessLog, drain_s: float) -> None:
        super().__init__(config)
        self.access_log, self.drain_s, self.drain_until = app, drain_s, 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.access_log.draining:
            super().handle_exit(sig, frame)
        self.access_log.draining = True
        self.drain_until = time.monotonic() + self.drain_s

    async def on_tick(self, counter: int) -> bool:
        late = time.monotonic() > self.drain_until
        if self.access_log.draining and (late or not self.access_log.active):
            self.should_exit = True
        return await super().on_tick(counter)


def serve(
    settings: GatewaySettings, host: str, port: int, certificate: Path | None = None, key: Path | None = None
) -> None:
    """Serve on `host`:`port` until stopped. Raises ServeError for an unusable port or certificate."""
    allow_connections()
    listener = _listen(host, port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, listener, certificate, key))


def allow_connections() -> None:
    """Raise the limit of open files to this user's maximum: each client needs one, and the usual 1,024 are few."""
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))


async def _serve(
    settings: GatewaySettings, listener: socket.socket, certificate: Path | None, key: Path | None
) -> None:
    async with rate_limits(settings) as limits, _application(settings, limits) as app:
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=2,
            ssl_certfile=certificate,
            ssl_keyfile=key,
        )
        try:
            config.load()
            await GatewayServer(config, app, settings.drain_s).serve(sockets=[listener])
        except (OSError, ssl.SSLError) as error:
            raise ServeError(f"{certificate} and {key} are not a certificate and its key: {error}") from error


@asynccontextmanager
async def _application(settings: GatewaySettings, limits: RateLimits) -> AsyncIterator[AccessLog]:
    """Yield the application over one Triton, or over several that `settings.triton` names."""
    if is_fleet(settings.triton):
        async with fleet_app(settings, limits=limits) as app:
            yield app
        return
    triton = Triton(settings.triton)
    if settings.on_demand is None:
        app, watcher = make_app(settings, triton, models=Catalogue(triton), limits=limits), None
    else:
        app, backend = make_on_demand_app(settings, settings.on_demand, triton, limits=limits)
        watcher = asyncio.ensure_future(backend.watch())
    try:
        yield app
    finally:
        if watcher is not None:
            watcher.cancel()
        await triton.close()


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(address_family(host))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ServeError(
            f"port {port} on {host} cannot be used ({error.strerror}); choose another: --port N"
        ) from error
    return listener
