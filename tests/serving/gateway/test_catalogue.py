"""Models that are away for a while, and names that no model ever had."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from builder.serving.gateway import catalogue
from builder.serving.gateway.app import make_app
from builder.serving.gateway.catalogue import Catalogue
from builder.serving.gateway.errors import ApiError
from builder.serving.gateway.settings import GatewaySettings
from tests.serving.gateway.asgi import Answer, ask
from tests.serving.gateway.fake_triton import FakeTriton
from tests.serving.gateway.test_hosted import CONFIG


@pytest.fixture(autouse=True)
def _anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each request that misses a model read the list."""
    monkeypatch.setattr(catalogue, "MIN_REFRESH_INTERVAL_S", 0.0)
    monkeypatch.setattr(catalogue, "REFRESH_AFTER_S", 0.0)


def _asked(triton: FakeTriton, path: str, body: Any, *, known: bool) -> Answer:
    """Ask while "topics" is away; `known`: the gateway has seen it before."""
    app = make_app(GatewaySettings(), triton, None, models=Catalogue(triton))

    async def run() -> Answer:
        if known:
            await ask(app, "/v1/models")
        triton.away = {"topics", "embeds_model"}
        await ask(app, "/v1/models")
        return await ask(app, path, body)

    return asyncio.run(run())


@pytest.mark.parametrize("known", [True, False])
def test_model_that_is_not_ready_is_503(known: bool) -> None:
    answer = _asked(FakeTriton(), "/v1/tasks/text-classification", {"model": "topics", "inputs": "a"}, known=known)
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")


def test_only_matching_model_that_is_not_ready_is_503() -> None:
    answer = _asked(FakeTriton(), "/predict", {"inputs": "a"}, known=True)
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")


@pytest.mark.parametrize("name", ["other", "Topics"])
def test_unknown_model_is_404(name: str) -> None:
    answer = _asked(FakeTriton(), "/v1/tasks/text-classification", {"model": name, "inputs": "a"}, known=True)
    assert answer.status == 404


class WithFront(FakeTriton):
    """Triton with a shared front, "encoders"."""

    hosts: tuple[str, ...] = ("one", "two")

    async def index(self) -> list[tuple[str, str]]:
        return [] if "encoders" in self.away else [("encoders", "1")]

    async def config(self, name: str, version: str) -> model_config_pb2.ModelConfig:
        return text_format.Parse(CONFIG, model_config_pb2.ModelConfig())

    async def hosted(self, front: str) -> str:
        entry = {"version": 1, "inputs": {"text_input": False}, "outputs": {"embedding": [4]}, "max_batch_size": 4}
        return json.dumps({"models": {name: {**entry, "parameters": {}} for name in self.hosts}})


async def test_hosted_model_is_unavailable_with_its_front() -> None:
    triton = WithFront()
    models = Catalogue(triton)

    async def refused(name: str) -> int:
        await models.all()
        with pytest.raises(ApiError) as error:
            await models.get(name)
        return error.value.status

    await models.all()
    triton.away = {"encoders"}
    away = await refused("two")
    triton.away, triton.hosts = set(), ("one",)
    assert [away, await refused("two")] == [503, 404]
