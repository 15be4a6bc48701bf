"""Run the gateway's process: uvicorn, which drains running requests before it stops."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import time
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop

from builder.common.errors import ServeError
from builder.serving.gateway.access_log import AccessLog
from builder.serving.gateway.app import make_app
from builder.serving.gateway.catalogue import Catalogue
from builder.serving.gateway.http_protocol import Protocol
from builder.serving.gateway.residency.app import make_on_demand_app
from builder.serving.gateway.settings import GatewaySettings
from builder.serving.gateway.triton import Triton

KEEP_ALIVE_S = 75  # longer than clients and load balancers keep an idle connection


class GatewayServer(uvicorn.Server):
    """Server that drains on the first stop signal and ends at once on the second.

    While draining it refuses new requests and ends when the running ones are answered.
    """

    def __init__(self, config: uvicorn.Config, journal: AccessLog, drain_s: float) -> None:
        super().__init__(config)
        self.access_log, self.drain_s, self.drain_until = journal, drain_s, 0.0

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
    triton = Triton(settings.triton)
    if settings.on_demand is None:
        journal, watcher = make_app(settings, triton, models=Catalogue(triton)), None
    else:
        journal, backend = make_on_demand_app(settings, settings.on_demand, triton)
        watcher = asyncio.ensure_future(backend.watch())
    try:
        config = uvicorn.Config(
            journal,
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
        config.load()
        await GatewayServer(config, journal, settings.drain_s).serve(sockets=[listener])
    except (OSError, ssl.SSLError) as error:
        raise ServeError(f"{certificate} and {key} are not a certificate and its key: {error}") from error
    finally:
        if watcher is not None:
            watcher.cancel()
        await triton.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ServeError(
            f"port {port} on {host} cannot be used ({error.strerror}); choose another: --port N"
        ) from error
    return listener
