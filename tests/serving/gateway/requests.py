"""A gateway over a stand-in for Triton, and requests to it."""

from __future__ import annotations

import asyncio
from typing import Any, TextIO

from builder.serving.gateway.access_log import AccessLog
from builder.serving.gateway.app import make_app
from builder.serving.gateway.catalogue import Catalogue
from builder.serving.gateway.settings import GatewaySettings
from tests.serving.gateway.asgi import Answer, ask
from tests.serving.gateway.fake_triton import FakeTriton

CHAT: dict[str, Any] = {"model": "writes", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


def gateway(triton: FakeTriton | None = None, log: TextIO | None = None, **settings: Any) -> AccessLog:
    triton = triton or FakeTriton()
    return make_app(GatewaySettings(**settings), triton, log, models=Catalogue(triton))


def fetch(path: str, body: Any = None, app: AccessLog | None = None, **options: Any) -> Answer:
    return asyncio.run(ask(app or gateway(), path, body, **options))
