"""Keys, their limits and the limit of concurrent requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from builder.common.errors import SpecError
from builder.serving.gateway.auth import read_keys
from tests.serving.gateway.asgi import Answer, ask
from tests.serving.gateway.fake_triton import FakeTriton
from tests.serving.gateway.requests import CHAT, fetch, gateway


def test_encoder_requests_beyond_the_limit_are_refused() -> None:
    triton, body = FakeTriton(), {"model": "embeds", "input": "a"}
    triton.may_answer = may_answer = asyncio.Event()
    app = gateway(triton, max_waiting=2)

    async def several() -> list[Answer]:
        embeds = [asyncio.ensure_future(ask(app, "/v1/embeddings", body)) for _ in range(3)]
        others = [ask(app, "/v1/chat/completions", CHAT), ask(app, "/predict", {"inputs": "a"})]
        left = ask(app, "/v1/embeddings", body, disconnect_after=0)
        rest = asyncio.gather(*embeds[:2], *others, left)
        refused = await embeds[2]
        may_answer.set()
        return [refused, *await rest]

    refused, first, second, chat, other, _ = asyncio.run(several())
    assert [first.status, second.status, chat.status, other.status] == [200] * 4
    assert (refused.status, refused.error["code"], refused.headers["retry-after"]) == (429, "queue_full", "1")
    assert fetch("/v1/embeddings", body, app).status == 200, "those that are over count no more"


def test_full_queue_sets_retry_after() -> None:
    refused = fetch("/v1/chat/completions", {**CHAT, "stream": True}, gateway(FakeTriton(slots=0)))
    assert (refused.status, refused.headers["retry-after"]) == (429, "1")
    assert refused.error["code"] == "queue_full"


def test_keys_and_request_limits() -> None:
    keys = (("ann", "sk-1"), ("bob", "sk-2"))
    app = gateway(keys=keys, requests_per_minute=2)
    assert fetch("/v1/models", app=app).status == 401
    assert fetch("/v1/models", app=app, headers={"authorization": "Basic sk-1"}).status == 401
    assert fetch("/health", app=app).status == 200
    ann, bob = ({"authorization": f"Bearer {secret}"} for _, secret in keys)
    assert [fetch("/v1/models", app=app, headers=ann).status for _ in range(3)] == [200, 200, 429]
    assert fetch("/v1/models", app=app, headers=bob).status == 200


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# people\nann:sk-1\n\n")
    assert read_keys(tmp_path / "keys", "bob:a:b") == (("ann", "sk-1"), ("bob", "a:b"))
    for text in ("sk-1", "ann:", "ann:x\nann:y", ""):
        (tmp_path / "keys").write_text(text)
        with pytest.raises(SpecError):
            read_keys(tmp_path / "keys", "")
