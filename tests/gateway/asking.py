"""A gateway over a stand-in for Triton, and requests to it."""

from __future__ import annotations

import asyncio
from typing import Any, TextIO

from builder.gateway.app import make_app
from builder.gateway.catalogue import Catalogue
from builder.gateway.journal import Journal
from builder.gateway.settings import Settings
from tests.gateway.asgi import Answer, ask
from tests.gateway.fake_triton import FakeTriton


def gateway(triton: FakeTriton | None = None, log: TextIO | None = None, **settings: Any) -> Journal:
    triton = triton or FakeTriton()
    return make_app(Settings(**settings), triton, log, models=Catalogue(triton))


def asked(path: str, body: Any = None, app: Journal | None = None, **options: Any) -> Answer:
    return asyncio.run(ask(app or gateway(), path, body, **options))
