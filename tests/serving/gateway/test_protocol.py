"""Some connections are closed, on real sockets, and the others stay open."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from builder.serving.gateway import server
from builder.serving.gateway.server import Protocol
from builder.serving.server.triton import free_ports
from tests.served.patience import comes_about, listens

WHOLE = b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\nx"
GATEWAY = """
import sys
from builder.cli import main
from builder.serving.gateway import server
server.REQUEST_TIMEOUT_S = 0.5
sys.exit(main())
"""
Client = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def test_gateway_drops_clients_that_send_no_request() -> None:
    """Regression: 300 connections that sent nothing were open after three minutes."""
    port = free_ports().http
    command = [sys.executable, "-c", GATEWAY, "gateway", "--url", "127.0.0.1:1", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            assert comes_about(lambda: listens(port) or process.poll() is not None)
            clients = [socket.create_connection(("127.0.0.1", port), 60) for _ in range(20)]
            assert [client.recv(1) for client in clients] == [b""] * len(clients)
            for client in clients:
                client.close()
        finally:
            process.kill()


class Application:
    """Application that reads a whole request and answers; not before `may_answer`, if there is one."""

    def __init__(self) -> None:
        self.may_answer: asyncio.Event | None = None
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive()).get("more_body"):
            pass
        if message["type"] == "http.disconnect":
            self.left.set()
            return
        if self.may_answer is not None:
            await self.may_answer.wait()
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})


def _talk(application: Application, client: Client) -> None:
    async def run() -> None:
        config = uvicorn.Config(application, ws="none", lifespan="off", log_level="critical")
        state, loop = ServerState(), asyncio.get_running_loop()
        server = await loop.create_server(lambda: Protocol(config, state, {}), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            async with asyncio.timeout(60):
                await client(reader, writer)
        finally:
            writer.close()
            server.close()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 0.2)


@pytest.mark.parametrize("sent", [b"", b"\r\n", WHOLE[:20], WHOLE[:-1]])
def test_connection_without_a_complete_request_is_closed(sent: bytes) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        assert await reader.read() == b""

    _talk(Application(), client)


@pytest.mark.parametrize("sent", [b"\r\n", WHOLE[:20], WHOLE[:-1]])
def test_connection_is_closed_for_half_a_later_request(sent: bytes) -> None:
    """An idle one is kept for longer; these are not idle."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE)
        await reader.readuntil(b"ok")
        writer.write(sent)
        assert await reader.read() == b""

    _talk(Application(), client)


def test_body_that_stalls_ends_its_request() -> None:
    application = Application()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE[:-1])
        await application.left.wait()
        assert await reader.read() == b""

    _talk(application, client)


def test_trickling_bytes_do_not_extend_the_timeout() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        closed = asyncio.ensure_future(reader.read())
        writer.write(WHOLE[:16])
        while not (await asyncio.wait({closed}, timeout=0.05))[0]:
            writer.write(b"x-a: b\r\n")

    _talk(Application(), client)


@pytest.mark.parametrize("more", [b"", WHOLE[:20], WHOLE[:-1], WHOLE])
def test_long_answer_is_not_cut_off(more: bytes) -> None:
    """It holds for any bytes that its client has sent of the next request meanwhile."""
    application = Application()

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        application.may_answer = asyncio.Event()
        writer.write(WHOLE + more)
        await asyncio.sleep(5 * server.REQUEST_TIMEOUT_S)
        application.may_answer.set()
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")

    _talk(application, client)
