"""The gateway on a port, in a thread, for official clients."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from tests.serving.gateway.fake_triton import FakeTriton
from tests.serving.gateway.requests import gateway


@contextlib.contextmanager
def served(triton: FakeTriton | None = None, **settings: Any) -> Iterator[str]:
    """Serve a gateway over `triton` while the context lasts; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(gateway(triton, **settings), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
