"""Malformed requests of every kind: each is answered, without a server error, and no slot stays taken.

`scripts/bench malformed` sends 10,000 of them to a real server.
"""

from __future__ import annotations

import asyncio
import json

from hypothesis import given, settings
from hypothesis import strategies as st

from builder.serving.gateway.app import APIS, make_app
from builder.serving.gateway.catalogue import Catalogue
from builder.serving.gateway.openapi import document
from builder.serving.gateway.settings import GatewaySettings
from tests.serving.gateway.asgi import Answer, ask
from tests.serving.gateway.fake_triton import MODELS, FakeTriton
from tests.serving.gateway.malformed import Sent, requests

TASKS = sorted({task for task, *_ in MODELS.values()})
REQUESTS = requests(document(APIS), sorted(MODELS), TASKS)


@settings(max_examples=40)
@given(st.lists(REQUESTS, min_size=8, max_size=8), st.integers(0, 3))
def test_malformed_requests_are_refused_without_residue(sent: list[Sent], leaves: int) -> None:
    triton = FakeTriton(slots=100)
    app = make_app(GatewaySettings(), triton, None, models=Catalogue(triton))

    async def run() -> list[Answer]:
        calls = [ask(app, s.path, s.body, disconnect_after=0 if at < leaves else None) for at, s in enumerate(sent)]
        return await asyncio.gather(*calls)

    for one, answer in zip(sent[leaves:], asyncio.run(run())[leaves:], strict=True):
        assert 200 <= answer.status < 500, (one.path, json.dumps(one.body), answer.pieces)
        if answer.status >= 400:
            assert answer.json["error"]
    assert triton.running == 0
    assert app.active == 0
