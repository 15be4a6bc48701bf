"""A gateway over a stand-in for Triton, and requests to it."""

from __future__ import annotations

import asyncio
from typing import Any, TextIO

from builder.serving.gateway.app import make_app
from builder.serving.gateway.catalogue import Catalogue
from builder.serving.gateway.journal import Journal
from builder.serving.gateway.settings import Settings
from tests.serving.gateway.asgi import Answer, ask
from tests.serving.gateway.fake_triton import FakeTriton


def gateway(triton: FakeTriton | None = None, log: TextIO | None = None, **settings: Any) -> Journal:
    triton = triton or FakeTriton()
    return make_app(Settings(**settings), triton, log, models=Catalogue(triton))


def asked(path: str, body: Any = None, app: Journal | None = None, **options: Any) -> Answer:
    return asyncio.run(ask(app or gateway(), path, body, **options))
